"""Distribution on a cluster: documents to workers, requests to servers. Starts no cluster."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blending import CHUNKS
from ray_kvrag.cluster import Cluster, on_all_machines
from ray_kvrag.command import main
from ray_kvrag.front import ServerLost, front
from ray_kvrag.routing import Route
from ray_kvrag.warm import DocumentQueue

from kvrag import SettingError
from kvrag.server.settings import ApiKey, ServerSettings

SERVERS = ("a", "b", "c")
IDLE = dict.fromkeys(SERVERS, 0)


# ---------------------------------------------------------------- documents to workers


def test_documents_without_common_texts_go_out_in_order() -> None:
    queue = DocumentQueue({"one": ["x"], "two": ["y"], "three": ["z"]}, done=["two"])
    assert [queue.next(), queue.next(), queue.next()] == ["one", "three", None]


def test_a_common_text_is_encoded_by_one_worker_at_a_time_until_it_is_stored_alone() -> None:
    queue = DocumentQueue({name: ["common", name] for name in "abcde"} | {"f": ["f"]}, done=[])
    assert [queue.next(), queue.next(), queue.next()] == ["a", "f", None]
    queue.put_back("a")  # its worker died
    first = queue.next()
    assert queue.next() is None
    queue.finish(first or "")
    second = queue.next()
    assert queue.next() is None
    queue.finish(second or "")  # two documents hold it: it is stored alone
    rest = [queue.next(), queue.next(), queue.next()]
    assert sorted([first, second, *rest]) == list("abcde")
    assert queue.next() is None


def test_a_warm_document_counts_as_a_holder() -> None:
    queue = DocumentQueue({name: ["common"] for name in "abcd"}, done=["a"])
    assert [queue.next(), queue.next()] == ["b", None]
    queue.finish("b")
    assert [queue.next(), queue.next()] == ["c", "d"]


@pytest.mark.parametrize(
    ("cpus", "gpus", "device", "workers", "wanted"),
    [
        ((8,), 0, None, 2, {"num_cpus": 4, "num_gpus": 0}),
        ((8, 4), 0, None, 3, {"num_cpus": 4, "num_gpus": 0}),
        ((2,), 0, None, 5, {"num_cpus": 1, "num_gpus": 0}),
        ((8,), 4, None, 4, {"num_cpus": 1, "num_gpus": 1}),
        ((8,), 4, "cpu", 1, {"num_cpus": 8, "num_gpus": 0}),
    ],
)
def test_resources_of_a_worker(cpus: Any, gpus: int, device: Any, workers: int, wanted: Any) -> None:
    assert Cluster(False, cpus, gpus).resources(device, workers) == wanted


def test_a_folder_is_for_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    args = argparse.Namespace(model="model", store="kv", store_cache=None, parser=None)
    alone = on_all_machines(args, Cluster(False, (2,), 0))
    assert alone == {
        "model": str(tmp_path / "model"),
        "store": str(tmp_path / "kv"),
        "store_cache": None,
    }
    with pytest.raises(SettingError, match="the folder kv belongs to one machine, and the cluster has 2: pass --store"):
        on_all_machines(args, Cluster(False, (2, 2), 0))
    args.store = "s3://bucket/corpus"
    assert on_all_machines(args, Cluster(False, (2, 2), 0))["store"] == "s3://bucket/corpus"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["warm", "docs", "--address", "127.0.0.1:9"], "127.0.0.1:9"),
        (["serve", "--address", "ray://127.0.0.1:9"], "ray://127.0.0.1:9"),
    ],
)
def test_an_address_where_no_cluster_runs(
    words: list[str], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(CHUNKS[0])
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot reach the Ray cluster {address}" in line


@pytest.mark.parametrize(
    "words", [["serve", "--replicas", "3-2"], ["serve", "--replicas", "0"], ["warm", "docs", "--address", "docs"]]
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert re.search(r"--\w+: must be a", capsys.readouterr().err)


# ---------------------------------------------------------------- requests to servers


def chat(*texts: str, system: str = "", **more: Any) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    return json.dumps({"messages": [*messages, {"role": "user", "content": "\n\n".join(texts)}], **more}).encode()


def best(body: bytes, loads: dict[str, int] = IDLE, spread: int = 4, path: str = "/v1/chat/completions") -> str:
    return Route.of(path, "", body).rank(loads, spread)[0]


def test_the_same_chunk_goes_to_the_same_server_whatever_the_question() -> None:
    for chunk in CHUNKS:
        homes = {
            best(chat(chunk, question, system="You are helpful. " * 9))
            for question in ("Who?", "What is it?", "Why so?")
        }
        others = {
            best(json.dumps(body).encode())
            for body in (
                {"prompt": f"{chunk}\n\nWho?"},
                {"prompt": [f"{chunk}\n\nWho?"]},
                {"input": f"{chunk}\n\nWho?"},
                {"input": [{"role": "user", "content": [{"type": "input_text", "text": chunk}]}]},
                {"messages": [{"role": "user", "content": "Who?"}], "documents": [{"id": "1", "text": chunk}]},
                {"messages": [{"role": "user", "content": "Who?"}], "chunks": [chunk]},
            )
        }
        assert len(homes | others) == 1


def test_chunks_spread_over_the_servers_and_stay_when_one_goes() -> None:
    chunks = [f"{chunk} {number}" for chunk in CHUNKS for number in range(50)]
    homes = {chunk: best(chat(chunk)) for chunk in chunks}
    assert min(Counter(homes.values()).values()) > len(chunks) / 5
    left = {"a": 0, "b": 0}
    assert all(best(chat(chunk), left) == home for chunk, home in homes.items() if home != "c")


def test_chunks_vote_by_length() -> None:
    long, *short = (
        next(c for n in range(99) if best(chat(c := f"{CHUNKS[0]} {n}" * k)) == home)
        for home, k in (("a", 5), ("b", 1), ("b", 1))
    )
    assert best(chat(*short, long)) == "a"


def test_a_busy_server_is_passed_over() -> None:
    body = chat(CHUNKS[0])
    home = best(body)
    assert best(body, IDLE | {home: 4}) == home
    assert best(body, IDLE | {home: 5}) != home
    # not for documents: one server knows what is queued
    corpus = best(b"", path="/v1/corpus/a.txt")
    assert best(b"", IDLE | {corpus: 99}, path="/v1/corpus") == corpus


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"[" * 10_000, b'{"messages": 1}', b'{"prompt": null}', b'{"messages": [{}]}']
)
def test_a_request_without_a_text_goes_to_the_least_busy_server(body: bytes) -> None:
    assert best(body, {"a": 2, "b": 1, "c": 2}) == "b"


# ---------------------------------------------------------------- the front

SETTINGS = ServerSettings(name="m", api_keys=(ApiKey("secret", "tenant"),), max_body=1000)
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def body(text: str, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def ask(pass_on: Any, content: bytes = b"{}", key: str = "secret") -> httpx.Response:
    transport = httpx.ASGITransport(front(SETTINGS, pass_on))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.post("/v1/completions", content=content, headers={"Authorization": f"Bearer {key}"})


def dying(times: int, *first: dict[str, Any]) -> tuple[Any, list[bytes]]:
    calls: list[bytes] = []

    async def pass_on(scope: Any, content: bytes, route: Route) -> AsyncGenerator[list[Any], None]:
        calls.append(content)
        if len(calls) <= times:
            if first:
                yield list(first)
            raise ServerLost("killed")
        yield [START, body("whole")]

    return pass_on, calls


async def test_a_request_whose_server_dies_before_it_answers_is_sent_again() -> None:
    pass_on, calls = dying(2)
    assert (await ask(pass_on, b'{"a": 1}')).text == "whole"
    assert calls == [b'{"a": 1}'] * 3
    pass_on, calls = dying(3)
    response = await ask(pass_on)
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert len(calls) == 3


async def test_a_stream_whose_server_dies_ends_with_an_error() -> None:
    pass_on, calls = dying(1, START, body("data: 1\n\n", more=True))
    response = await ask(pass_on)
    assert response.text.startswith('data: 1\n\ndata: {"error": {"message": "the server that worked on this')
    assert len(calls) == 1


async def test_the_front_checks_keys_and_sizes() -> None:
    pass_on, calls = dying(0)
    assert (await ask(pass_on, key="wrong")).status_code == 401
    too_long = await ask(pass_on, b"x" * 1001)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "body_too_large")
    assert calls == []
