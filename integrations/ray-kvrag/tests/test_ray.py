"""`ray-kvrag warm` and `ray-kvrag serve` on a Ray that this file starts, with two CPUs and an S3 server."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from blending import CHUNKS
from places import Bucket, free_port
from ray import serve
from ray_kvrag.command import main
from serving import until

from kvrag import BlendEngine, FileStore, SharedStore
from kvrag.cli.main import main as kvrag

NOTICE = (
    "Nothing in this handbook may be given to anybody outside of the company without the written consent of the editor."
)
PLACES = ("Florton", "Grelville", "Stelburg", "Stinmouth", "Holra", "Ingla", "Branna", "Eldale", "Alla", "Tarn")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ratio": 1.0}
OPTIONS = ("--dtype", "float32", "--json")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster(s3: Bucket) -> Iterator[None]:
    """Ray, without its dashboard; all of its processes end with the fixture."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets are short
    sources = [str(ROOT), str(ROOT / "integrations" / "ray-kvrag"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as environment:  # workers inherit it
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sources)))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            end_ray()
            shutil.rmtree(folder, ignore_errors=True)


def end_ray() -> None:
    """End Ray as its users do; after a while, kill remaining processes and fail."""
    serve.shutdown()
    mine = processes()
    assert mine
    ray.shutdown()
    try:
        until(lambda: not any(map(is_alive, mine)), 120)
    finally:
        for pid in filter(is_alive, mine):
            os.kill(pid, signal.SIGKILL)


def processes() -> dict[int, str]:
    """Ray's processes below this one, with their command lines."""
    lines = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            lines[child.pid] = " ".join(child.cmdline())
    return {pid: line for pid, line in lines.items() if "ray" in line and "moto" not in line}


def is_alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return str(psutil.Process(pid).status()) != "zombie"
    return False


def titled(title: str) -> list[int]:
    return [pid for pid, line in processes().items() if line.startswith(title)]


def paragraphs(place: str) -> list[str]:
    """Return the chunks of a document."""
    return [f"From the archives of {place}, page {number}: {chunk}" for number, chunk in enumerate(CHUNKS, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents with a paragraph in common."""
    docs = tmp_path_factory.mktemp("docs")
    for place in PLACES:
        own = paragraphs(place)
        (docs / f"{place}.txt").write_text("\n\n".join([*own[:2], NOTICE, *own[2:]]))
    (docs / "broken.txt").write_bytes(b"\0")
    return docs


@pytest.fixture(scope="module")
def url(s3: Bucket) -> str:
    return s3.url.replace("PLACE", "ray")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def warm(folder: Path, *words: object, command: Callable[..., int] = main) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as output:
        assert command(["warm", str(folder), "--chunk-tokens", "50", *OPTIONS, *map(str, words)]) == 0
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def catalog(store: FileStore | SharedStore) -> tuple[Any, ...]:
    """Return a store's documents with their chunks, its texts, and which variants it has of each."""
    documents = store.documents()
    entries = {entry.text_key for entry in store.entries(0)}
    states = store.look_up(sorted(entries))
    return documents, entries, {text: (dict(state.variants), dict(state.sources)) for text, state in states.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that one process has warmed."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def first(folder: Path, alone: Path) -> dict[str, int]:
    """The counts of one process that encodes one document after the other, in `alone`."""
    files = [file for file in sorted(folder.iterdir()) if file.name != "broken.txt"]
    results = [warm(file, "--store", alone, command=kvrag) for file in files]
    counts = ("chunks", "new", "reused", "skipped", "tokens", "bytes", "indexed", "files")
    return {name: sum(result[name] for result in results) for name in counts}


@pytest.fixture(scope="module")
def both(cluster: None, folder: Path, url: str, caches: Path) -> dict[str, Any]:
    """The result of two workers, at `url`."""
    return warm(folder, "--store", url, "--store-cache", caches, "--workers", "2")


def test_two_workers_store_what_one_process_stores(
    first: dict[str, int], both: dict[str, Any], url: str, caches: Path, alone: Path
) -> None:
    assert {name: both[name] for name in first} == first
    assert [Path(problem["file"]).name for problem in both["problems"]] == ["broken.txt"]
    assert both["gone"] == []
    assert sum(worker["tokens"] for worker in both["workers"]) == first["tokens"] > 800
    assert {worker["worker"] for worker in both["workers"]} == {1, 2}
    with closing(FileStore(alone)) as one, closing(SharedStore(url, caches)) as other:
        assert catalog(one) == catalog(other)


def test_a_worker_is_killed(
    cluster: None, first: dict[str, int], folder: Path, caches: Path, s3: Bucket, alone: Path
) -> None:
    url = s3.url.replace("PLACE", "killed")
    killed = threading.Thread(target=kill_one, args=("ray::EncodingWorker.warm",))
    killed.start()
    words = ("--store", url, "--store-cache", caches, "--workers", "2")
    result = warm(folder, *words)
    killed.join()
    assert result["lost"] == 1
    with closing(FileStore(alone)) as one, closing(SharedStore(url, caches)) as other:
        whole = catalog(one)
        assert catalog(other)[:2] == whole[:2]
        # no more was encoded than by one process
        assert result["tokens"] <= sum(other.count_tokens().values())
    documents = set(whole[0])
    (folder / "Tarn.txt").rename(folder / "Thorn.txt")
    again = warm(folder, *words, "--workers", "1", "--prune")
    (folder / "Thorn.txt").rename(folder / "Tarn.txt")
    # the first document relies on the variant from before others had the paragraph: it is sent, and nothing is encoded
    assert (again["warm"], again["gone"]) == (8, [str(folder / "Tarn.txt")])
    with closing(SharedStore(url, caches)) as other:
        assert set(other.documents()) == documents - {str(folder / "Tarn.txt")} | {str(folder / "Thorn.txt")}


def kill_one(title: str) -> None:
    """Kill a process while it has this title."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if pids := titled(title):
            os.kill(pids[0], signal.SIGKILL)
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def deploy(both: dict[str, Any], url: str, caches: Path) -> Iterator[Callable[[], httpx.Client]]:
    """Function that deploys two replicas, or replaces them."""
    port = free_port()
    words = ["serve", "--store", url, "--store-cache", str(caches), "--port", str(port), "--replicas", "2", *OPTIONS]

    def deployed() -> httpx.Client:
        assert main(words) == 0
        return client

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        yield deployed


@pytest.fixture(scope="module")
def http(deploy: Callable[[], httpx.Client]) -> httpx.Client:
    return deploy()


def prompt(place: str) -> str:
    """Return a prompt whose own chunks outweigh the common one, so that prompts spread over both replicas."""
    own = paragraphs(place)
    return "\n\n".join([own[2], NOTICE, own[0], own[1], "Who likes curry?"])


def messages(place: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(place)}]


def ask(http: httpx.Client, place: str, **more: Any) -> httpx.Response:
    body = {"model": "reader", "messages": messages(place), "max_tokens": 8}
    return http.post("/v1/chat/completions", json=body | GREEDY | more)


@pytest.fixture(scope="module")
def expected(first: dict[str, int], alone: Path) -> dict[str, str]:
    """The embedded engine's answers."""
    with BlendEngine.from_pretrained("reader", dtype="float32", store=alone) as engine:
        answers = {place: engine.generate(messages(place), max_new_tokens=8, **GREEDY) for place in PLACES}
    return {place: answer.text for place, answer in answers.items()}


def test_replicas_answer_as_the_embedded_engine_does(http: httpx.Client, expected: dict[str, str]) -> None:
    answers = [ask(http, place) for place in PLACES]
    assert {place: text(answer) for place, answer in zip(PLACES, answers, strict=True)} == expected
    homes = {place: answer.headers["x-kvrag-replica"] for place, answer in zip(PLACES, answers, strict=True)}
    assert len(set(homes.values())) == 2
    for place, home in homes.items():
        again = ask(http, place)
        assert again.headers["x-kvrag-replica"] == home  # it has the prompt's KV in memory
        assert again.json()["kvrag"]["conversation_tokens"] == again.json()["usage"]["prompt_tokens"] - 1
        assert text(again) == expected[place]


def text(answer: httpx.Response) -> str:
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def test_streams_come_piece_by_piece(http: httpx.Client, expected: dict[str, str]) -> None:
    body = {"model": "reader", "stream": True, "messages": messages("Alla"), "max_tokens": 8}
    pieces = []
    with http.stream(
        "POST", "/v1/chat/completions", json=body | {"max_tokens": 8, "temperature": 0, "ratio": 1}
    ) as response:
        for part in response.iter_raw():
            pieces.append(part.decode())
    assert len(pieces) > 3
    events = [json.loads(line[6:]) for line in "".join(pieces).splitlines() if line.startswith("data: {")]
    answer = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert answer == expected["Alla"]
    assert pieces[-1].endswith("data: [DONE]\n\n")


def test_all_replicas_find_an_uploaded_document(http: httpx.Client) -> None:
    http.put("/v1/corpus/new.txt", content=b"Ulm Orrick repairs clocks in Vellmar. He has two dogs.").raise_for_status()
    asked: dict[str, Any] = {}
    for number in range(40):
        question = [{"role": "user", "content": f"Who repairs clocks in Vellmar, and how many dogs has he? {number}"}]
        body = {"model": "reader-rag", "messages": question, "max_tokens": 1, "retrieval": {"top_k": 1}}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status()
        asked[answer.headers["x-kvrag-replica"]] = answer.json()["citations"][0]["document"]
        if len(asked) == 2:
            break
    assert list(asked.values()) == ["new.txt"] * 2


def under_load(http: httpx.Client, expected: dict[str, str], disturb: Callable[[], object]) -> int:
    """Send requests without a pause until shortly after the disturbance; return the number of answers."""
    done = threading.Event()

    def client(number: int) -> int:
        count = 0
        while not done.is_set():
            place = PLACES[(count + 5 * number) % len(PLACES)]
            answer = ask(http, place)
            assert (answer.status_code, text(answer)) == (200, expected[place])
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client, number) for number in range(2)]
        try:
            time.sleep(0.5)
            disturb()
            time.sleep(0.5)
        finally:
            done.set()
        return sum(client.result() for client in clients)


def test_a_replica_is_killed_under_load(http: httpx.Client, expected: dict[str, str]) -> None:
    def kill() -> None:
        before = set(titled("ray::ServeReplica:kvrag:engine"))
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(titled("ray::ServeReplica:kvrag:engine")) - before) == 1, 60)

    assert under_load(http, expected, kill) > 4


def test_a_rolling_restart_fails_no_request(
    http: httpx.Client, deploy: Callable[[], httpx.Client], expected: dict[str, str]
) -> None:
    def answering() -> set[str]:
        return {ask(http, place).headers["x-kvrag-replica"] for place in PLACES}

    before = answering()
    assert under_load(http, expected, deploy) > 4
    until(lambda: not before & answering(), 60)
