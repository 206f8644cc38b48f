"""The command line, in-process, on the bundled reader and the articles in examples/corpus."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from pdf import PDF, pdf

import kvrag.cli.common
import kvrag.ingest.ingest
import kvrag.retrieval.index
from kvrag import BlendEngine, Model, SettingError
from kvrag.cli import serve
from kvrag.cli.common import progress, read_config
from kvrag.cli.main import _COMMANDS, _parser, main
from kvrag.config import DEFAULT_POLICY
from kvrag.progress import watched
from kvrag.store import FileStore
from kvrag.words import human_bytes

CORPUS = Path(__file__).parents[3] / "examples" / "corpus"
QUESTIONS = (("What does Ingla play?", "leather drum"), ("Which town was first settled in 1957?", "Jomouth"))
QUESTION, ANSWER = "In which year did Ingla leave school?", "1885"
CUT = ("--chunk-tokens", 40)  # two chunks to each article of `folder`
CONTEXT = ("--top-k", "3", "--around", "2")
load_embedder = functools.cache(kvrag.retrieval.index.load_embedder)
Json = Callable[..., Any]
CHUNKS = 78  # of the corpus, one of them too short to be reused


@pytest.fixture(scope="module", autouse=True)
def reader() -> Model:
    """Stays loaded between tests."""
    return Model.from_pretrained("reader")


@pytest.fixture(autouse=True)
def _embedder_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory, reader: Model) -> Path:
    """A store with the corpus; tests must not change it."""
    store = tmp_path_factory.mktemp("warmed")
    kvrag.retrieval.index.load_embedder, original = load_embedder, kvrag.retrieval.index.load_embedder
    try:
        assert main(["warm", str(CORPUS), "--store", str(store), *map(str, CUT), "--json"]) == 0
    finally:
        kvrag.retrieval.index.load_embedder = original
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three articles of the corpus, which tests may change."""
    inside = tmp_path / "docs"
    inside.mkdir()
    for name in ("ingla.txt", "holra.txt", "jomouth.txt"):
        shutil.copy(CORPUS / name, inside)
    return inside


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Json:
    """Run a command with --json; return its result, which must be the whole stdout."""

    def call(*argv: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with one line on stderr; return the line."""

    def call(*argv: object, code: int = 1) -> str:
        capsys.readouterr()
        try:
            ended: object = main([*map(str, argv)])
        except SystemExit as end:  # 2 = wrong arguments
            ended = end.code
        assert ended in (code, 2)
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert captured.out == ""
        assert lines[-1].startswith("kvrag")
        assert not any("Traceback" in line for line in lines)
        return lines[-1]

    return call


def keys(store: Path) -> set[str]:
    return {path.name for path in (store / "chunks").glob("*/*.safetensors")}


# -------------------------------------------------------------------- help and usage


NEEDED = {"ask": ["x"], "explain": ["x"], "warm": [__file__], "store": ["stats"]}
"""Arguments without which a command is wrong anyway."""
USES_MODEL = [["ask", "x"], ["explain", "x"], ["verify"], ["warm", __file__]]
WRONG = [
    *([*command.split(), *NEEDED.get(command, []), "--wrong-flag"] for command in _COMMANDS),
    *(["ask", "x", *wrong] for wrong in (["--ratio", "2"], ["--policy", "no"], ["--codec", "no"], ["--top-k", "0"])),
    *(["ask", "x", *wrong] for wrong in (["--model", "./missing"], ["--store", "missing"], ["--max-tokens", "0"])),
    *([*command, "--model", name] for command in USES_MODEL for name in ("raeder", "gpt2", "./missing", "no/body")),
    ["warm", __file__, "--chunk-tokens", "5"],
    ["serve", "--chunk-tokens", "5"],
    *(["serve", *wrong] for wrong in (["--port", "65536"], ["--concurrency", "0"], ["--prompt-template", "missing"])),
    *(["serve", *wrong] for wrong in (["--api-key", "a b"], ["--temperature", "3"], ["--chunk-overlap", "256"])),
    ["warm", "missing"],
    ["warm", __file__, "--chunk-overlap", "256"],
    ["store", "stats", "--store", "missing"],
    ["verify", "--dtype", "int4"],
    ["explain", "missing.txt"],
    ["verify", "--chunk-tokens", "0"],
]


def test_arguments_are_checked_before_torch_is_imported() -> None:
    """All in one process: imports of one command would show in the next ones."""
    program = """
import json, sys
from kvrag.cli.main import main
for argv in json.loads(sys.argv[1]):
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    assert code == 0 if "--help" in argv else code in (1, 2), argv
    found = {"torch", "transformers", "sentence_transformers"} & set(sys.modules)
    assert not found, (argv, found)
"""
    every = [*([*command.split(), "--help"] for command in _COMMANDS), ["--help"], *WRONG]
    command = [sys.executable, "-c", program, json.dumps(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("warm", "ask", "store", "verify"):
        assert f"\n    {name} " in done.stdout
    assert done.stdout.count("\n  --json ") >= len(_COMMANDS)


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("wram docs", "invalid choice: 'wram' (choose from"),
        ("warm", "kvrag warm: the following arguments are required: PATH; see `kvrag warm --help`"),
        ("warm docs --xyz", "kvrag: unrecognized arguments: --xyz; see `kvrag --help`"),
        ("ask Who? --ratio high", "--ratio: invalid float value: 'high'"),
        ("ask Who? --dtype float8", "--dtype: invalid choice: 'float8' (choose from"),
    ],
)
def test_wrong_usage_is_one_line(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert said in line
    assert (caught.value.code, captured.out) == (2, "")


@pytest.mark.parametrize("command", [["warm", "README.md"], ["ask", "Who?"]], ids=lambda c: c[0])
@pytest.mark.parametrize("missing", ["faiss", "sentence_transformers", "langchain_text_splitters"])
def test_without_its_extra_a_command_fails_before_it_loads_a_model(
    missing: str, command: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    message = fails(*command, "--model", "nobody/nothing")
    assert message == f"kvrag: {missing} is not installed: pip install 'kvrag[cli]'"


def test_out_of_memory_is_one_line(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(Model, "from_pretrained", full)
    for error in (MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError("other")):
        if "other" in str(error):
            with pytest.raises(RuntimeError, match="other"):
                main(["warm", str(CORPUS)])
        else:
            assert "use a smaller model" in fails("warm", CORPUS)


# -------------------------------------------------------------------- warm


def test_warming_twice_encodes_nothing_twice(folder: Path, tmp_path: Path, reader: Model, as_json: Json) -> None:
    command = ("warm", folder, "--store", tmp_path / "kv", *CUT)
    first, second = as_json(*command), as_json(*command)
    assert first["files"] == 3
    assert first["new"] == first["chunks"] == first["indexed"] == 6
    assert first["bytes"] > first["tokens"] * reader.bytes_per_token  # the chunk files' headers come on top
    assert (second["new"], second["reused"], second["bytes"], second["indexed"]) == (0, 6, 0, 0)


def test_warm_prints_what_was_written(
    folder: Path, tmp_path: Path, reader: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", str(folder), "--store", str(tmp_path / "kv"), *map(str, CUT)]) == 0
    captured = capsys.readouterr()
    assert f"3 documents, for {tmp_path / 'kv'}\n" in captured.err
    with closing(FileStore(tmp_path / "kv")) as store:
        written = store.stats()
    size = human_bytes(written.bytes)
    assert captured.out.startswith(f"6 chunks: 6 new, 0 reused; {written.tokens} tokens and {size} written in ")


@pytest.mark.parametrize(
    ("option", "behind"),
    [((), "# Pay\n\nThe salary"), (("--context-tokens", 0), "")],
)
def test_contexts_that_chunks_are_encoded_with(
    option: tuple[object, ...], behind: str, tmp_path: Path, reader: Model, as_json: Json
) -> None:
    last = "Bonuses are paid in March, if the manager has agreed to them in writing before the year ends."
    (tmp_path / "pay.md").write_text(f"# Pay\n\nThe salary comes on the last working day of the month.\n\n{last}")
    as_json("warm", tmp_path / "pay.md", "--store", tmp_path / "kv", *CUT, *option)
    with BlendEngine(reader, tmp_path / "kv") as engine:
        [run] = engine.generate(last, max_new_tokens=1).report.runs
        assert isinstance(engine.store, FileStore)
        context = reader.tokenizer.decode(engine.store.open(run.key).context)
    assert context.strip().startswith(behind)
    assert bool(context.strip()) == bool(behind)


def test_the_server_encodes_chunks_with_the_same_context() -> None:
    args = _parser(["serve"]).parse_args(["serve", "--context-tokens", "8"])
    assert read_config(args).context_tokens == 8


def test_documents_whose_files_are_gone_are_reported_and_dropped_on_request(
    folder: Path, tmp_path: Path, as_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = tmp_path / "kv", tmp_path / "docs2"
    other.mkdir()
    shutil.copy(CORPUS / "alla.txt", other / "gone.txt")
    shutil.copy(CORPUS / "harfield.txt", other)
    for place in (folder, other):
        as_json("warm", place, "--store", store, *CUT)
    encoded = keys(store)
    (other / "gone.txt").unlink()
    (folder / "ingla.txt").unlink()
    (folder / "holra.txt").rename(folder / "moved.txt")
    gone = [str(folder / "holra.txt"), str(folder / "ingla.txt")]

    kept = as_json("warm", folder, "--store", store, *CUT)
    assert (kept["gone"], kept["dropped"]) == (gone, 0)
    assert keys(store) >= encoded
    assert main(["warm", str(folder), "--store", str(store), *map(str, CUT)]) == 0
    assert (
        f"the files of 2 documents no longer exist ({gone[0]}, {gone[1]}): pass --prune to drop them"
        in capsys.readouterr().err
    )

    pruned = as_json("warm", folder, "--store", store, "--prune", *CUT)
    assert (pruned["gone"], pruned["dropped"]) == (gone, 3), "two chunks, and a variant that only holra.txt relied on"
    assert len(keys(store)) == len(encoded) - 2
    assert as_json("warm", folder, "--store", store, "--prune", *CUT)["gone"] == []
    sources = {hit["document"] for hit in as_json("ask", QUESTION, "--top-k", 99, "--store", store)["context"]}
    assert sources == {*map(str, folder.iterdir()), str(other / "gone.txt"), str(other / "harfield.txt")}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress reads."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_progress_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    with progress("encoding", unit="tokens") as report:
        for seconds[0], done in ((100.0, 0), (100.1, 400), (105.0, 800), (110.2, 1020), (125.0, 2000)):
            report(done, 4000)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"encoding:  26%.* 1.02k/4.00k \[00:10<00:29, 100 tokens/s\]", first)
    assert re.fullmatch(r"encoding:  50%.* 2.00k/4.00k \[00:25<00:25, 80.0 tokens/s\]", second)


def test_progress_of_a_continued_run_counts_only_its_own_part(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    with progress("copying") as report:
        for seconds[0], done in ((0.0, 100), (20.0, 150), (40.0, 200)):
            report(done, 300)
    assert re.findall(r"\d\d:\d\d<\d\d:\d\d", capsys.readouterr().err) == ["00:20<01:00", "00:40<00:40"]


def test_progress_on_a_terminal_is_a_bar_that_goes_away(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, its = os.openpty()  # 0 columns, as in a container
    with open(its, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress("reading") as report, watched(None, "encoding") as update:
            for seconds[0], done in ((0.0, 1), (2.0, 5), (3.0, 8)):
                report(done, 10)
            assert update is not None
    written = b""
    with suppress(OSError):  # all was read, and the other end is closed
        while True:  # a terminal passes on in pieces
            written += os.read(mine, 1000)
    os.close(mine)
    drawn = written.decode().split("\r")
    assert re.match("reading:  80%[|][#█]+", drawn[-3])
    assert not drawn[-2].strip()
    assert drawn[-1] == ""


def test_elsewhere_progress_is_shown_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with watched(None, "encoding") as update:
        assert update is None
    with watched(print, "encoding") as update:
        assert update is print


def test_documents_that_cannot_be_seen_are_not_pruned(
    folder: Path, tmp_path: Path, as_json: Json, capsys: pytest.CaptureFixture[str], forbid: Callable[[Path], None]
) -> None:
    (folder / "closed").mkdir()
    (folder / "ingla.txt").rename(folder / "closed" / "ingla.txt")
    command = ("warm", folder, "--store", tmp_path / "kv", *CUT)
    as_json(*command)
    encoded = keys(tmp_path / "kv")
    forbid(folder / "closed")
    pruned = as_json(*command, "--prune", code=1)
    assert (pruned["gone"], pruned["dropped"]) == ([], 0)
    [problem] = pruned["problems"]
    assert (problem["file"], problem["message"]) == (str(folder / "closed"), "skipped: Permission denied")
    assert keys(tmp_path / "kv") == encoded
    assert main([*map(str, command), "--prune"]) == 1
    assert f"{folder / 'closed'}: skipped: Permission denied" in capsys.readouterr().err
    (folder / "holra.txt").unlink()
    assert as_json(*command, "--prune", code=1)["gone"] == [str(folder / "holra.txt")], "others are pruned"


@pytest.mark.parametrize("what", ["not mounted", "fails"])
def test_documents_of_a_folder_that_is_not_there_for_now_are_not_pruned(
    what: str, folder: Path, tmp_path: Path, as_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (folder / "ingla.txt").rename(disk / "ingla.txt")
    command = ("warm", folder, disk, "--store", tmp_path / "kv", *CUT)
    as_json(*command)
    encoded, scan = keys(tmp_path / "kv"), os.scandir

    def failing(path: Any) -> Any:
        if str(path) == str(disk):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scan(path)

    if what == "fails":
        monkeypatch.setattr(os, "scandir", failing)
    else:
        (disk / "ingla.txt").unlink()
    pruned = as_json(*command, "--prune", code=1)
    assert (pruned["gone"], pruned["dropped"], keys(tmp_path / "kv")) == ([], 0, encoded)
    assert str(disk) in [problem["file"] for problem in pruned["problems"]]


def test_a_file_that_cannot_be_read_keeps_its_chunks(
    folder: Path, tmp_path: Path, as_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("warm", folder, "--store", tmp_path / "kv", "--prune", *CUT)
    as_json(*command)
    encoded, read = keys(tmp_path / "kv"), Path.read_bytes

    def reading(path: Path) -> bytes:
        if path.name == "ingla.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    again = as_json(*command, code=1)
    assert (again["gone"], again["dropped"]) == ([], 0)
    assert [problem["file"] for problem in again["problems"]] == [str(folder / "ingla.txt")]
    assert keys(tmp_path / "kv") == encoded


def test_a_chunk_beyond_the_window_is_named_and_skipped_alone(
    folder: Path, tmp_path: Path, as_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    long = folder / "long.txt"
    long.write_text("It rained all day. " * 1000)
    command = ("warm", folder, "--store", tmp_path / "kv", "--chunk-tokens", 9000)
    result = as_json(*command)
    assert (result["files"], result["new"]) == (4, 3)
    [warning] = result["warnings"]
    assert warning.startswith(f"skipped: chunk 3 of document {str(long)!r}")
    assert main([*map(str, command)]) == 0
    assert warning in capsys.readouterr().err


def test_warm_on_a_server_that_is_not_there(fails: Callable[..., str]) -> None:
    command = ("warm", CORPUS, "--model", "/models/x")
    said = "base_url must be the URL of a server such as http://localhost:8000, got '127.0.0.1:1'"
    assert said in fails(*command, "--server", "127.0.0.1:1")
    assert "start the server, or check" in fails(*command, "--server", "http://127.0.0.1:1")
    assert "an API key must be non-empty ASCII" in fails(*command, "--server", "http://127.0.0.1:1", "--api-key", "ö")


def test_serve_reports_documents_that_no_key_reads(warmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = _parser(["serve"]).parse_args(["serve", "--store", str(warmed), "--api-key", "team:secret", "--no-corpus"])
    with ExitStack() as stack:
        app = serve.build(args, serve.read_settings(args), stack)
        serve._announce(args, serve.read_settings(args), "http://here", app.state.kvrag)
    said = "no API key reads the 30 documents in the namespace (default): pass a key without NAME"
    assert said in capsys.readouterr().err


def test_namespaces_have_their_own_documents(
    folder: Path, tmp_path: Path, as_json: Json, fails: Callable[..., str]
) -> None:
    store = ("--store", tmp_path / "kv")
    as_json("warm", folder, "--namespace", "alice", *store, *CUT)
    assert "and --namespace" in fails("ask", QUESTION, *store)
    (folder / "holra.txt").unlink()
    first = as_json("warm", folder, "--namespace", "bob", *store, *CUT)
    assert (first["indexed"], first["gone"]) == (first["chunks"], []), "chunks of the other namespace do not count"
    for namespace, count in (("alice", 3), ("bob", 2)):
        found = as_json("ask", QUESTION, "--top-k", 99, "--namespace", namespace, *store)["context"]
        assert len({hit["document"] for hit in found}) == count
    for command in ("ask", "explain"):
        assert "namespace" in fails(command, QUESTION, "--namespace", "a\0b", *store)


def test_an_interrupted_ingestion_continues_where_it_stopped(
    folder: Path,
    tmp_path: Path,
    as_json: Json,
    fails: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("warm", folder, "--store", tmp_path / "kv", *CUT)
    encode = kvrag.ingest.ingest.encode

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield from islice(encode(*arguments), 4)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvrag.ingest.ingest.encode", interrupted)
        said = fails(*command, code=130)
    again = as_json(*command)
    assert (again["new"], again["reused"], again["indexed"]) == (2, 4, 6)
    assert "interrupted; encoded chunks are kept: run the command again to resume" in said


def test_documents_are_encoded_in_portions(
    folder: Path, tmp_path: Path, as_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = as_json("warm", folder, "--store", tmp_path / "whole", *CUT)
    calls, warm = list[set[str]](), BlendEngine.warm

    def counted(engine: BlendEngine, texts: list[str], *, document: list[str], **options: Any) -> Any:
        calls.append(set(document))
        return warm(engine, texts, document=document, **options)

    monkeypatch.setattr(BlendEngine, "warm", counted)
    monkeypatch.setattr("kvrag.cli.warm._PORTION_BYTES", 1)
    parts = as_json("warm", folder, "--store", tmp_path / "parts", *CUT)
    assert [len(names) for names in calls] == [1] * whole["files"]
    assert len(set.union(*calls)) == whole["files"] > 1
    assert [parts[name] for name in ("chunks", "new", "tokens")] == [
        whole[name] for name in ("chunks", "new", "tokens")
    ]


def test_an_edited_file_drops_its_old_chunks(folder: Path, tmp_path: Path, as_json: Json) -> None:
    store = tmp_path / "kv"
    command = ("warm", folder, "--store", store, *CUT)
    as_json(*command)
    before = keys(store)
    file = folder / "ingla.txt"
    file.write_text(file.read_text().replace(ANSWER, "1999"))
    edited = as_json(*command)
    assert (edited["new"], edited["reused"]) == (1, 5)
    assert len(keys(store)) == 6
    assert len(keys(store) - before) == 1
    context = as_json("ask", QUESTION, "--store", store, "--top-k", 6, "--policy", "full")["context"]
    assert len(context) == 6
    assert "1999" in " ".join(hit["text"] for hit in context)
    assert ANSWER not in " ".join(hit["text"] for hit in context)


def test_every_kind_of_file_is_read(tmp_path: Path, as_json: Json) -> None:
    docs = tmp_path / "docs"
    (docs / "deep").mkdir(parents=True)
    (docs / "a.html").write_text("<style>p {}</style><p>Mira plays the harp.</p><script>run()</script>")
    (docs / "b.jsonl").write_text('{"text": "Kan owns a goat."}\n\n{"text": "Kan likes soup."}\n')
    (docs / "deep" / "c.md").write_text("Tran was born in Florton.")
    (docs / "d.pdf").write_bytes(PDF)
    (docs / ".hidden.txt").write_text("nobody reads this")
    (docs / "e.bin").write_bytes(b"\0\1")
    warmed = as_json("warm", docs, "--store", tmp_path / "kv")
    assert warmed["files"] == 4
    [others] = warmed["problems"]
    assert others == {"file": str(docs), "line": None, "message": others["message"]}
    assert "1 .bin" in others["message"]
    context = as_json("ask", "What?", "--store", tmp_path / "kv", "--top-k", 9, "--max-tokens", 1)["context"]
    assert {hit["text"] for hit in context} == {
        "Mira plays the harp.",
        "Kan owns a goat.",
        "Kan likes soup.",
        "Tran was born in Florton.",
        "Zel owns a snake.",
    }


def test_sources_in_a_pdf_have_pages(tmp_path: Path, as_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    drum = "In 1885 Ingla left school and learned to play the leather drum."
    (tmp_path / "report.pdf").write_bytes(pdf(drum, "", "Zel owns", "a snake."))
    store = ("--store", str(tmp_path / "kv"))
    as_json("warm", tmp_path / "report.pdf", *store, "--chunk-tokens", 18)
    command = ("ask", "Who owns a snake?", "--top-k", "2", "--max-tokens", "1", *store)
    context = as_json(*command)["context"]
    assert {hit["text"]: hit["pages"] for hit in context} == {
        drum: [1, 1],
        "Zel owns\n\na snake.": [3, 4],
    }
    assert main([*command]) == 0
    said = capsys.readouterr().err
    assert "report.pdf (pages 3-4), " in said
    assert "report.pdf (page 1)\n" in said


def test_files_that_are_not_text_are_named_and_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    broken = {"bin.txt": b"\0\1\2", "latin.txt": "caf\xe9 \xfc".encode("latin-1"), "bad.pdf": b"%PDF-1.7 nothing"}
    broken |= {"bad.jsonl": b'{"text": 5}\n[1]\n', "empty.md": b" \n"}
    broken["latin.txt"] = b"\xff\0\xff\0\xfe"
    (folder / os.fsdecode(b"gr\xfc\xdfe.txt")).write_text("The name of this file is in Latin-1.")
    (folder / "lines.jsonl").write_bytes(b'{"text": "A line of its own."}\n[1]\n')
    for name, content in broken.items():
        (folder / name).write_bytes(content)
    assert main(["warm", str(folder), "--store", str(tmp_path / "kv"), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    problems = {(Path(problem["file"]).name, problem["line"]) for problem in result["problems"]}
    whole = {(name, None) for name in (*broken, "gr\ufffd\ufffde.txt") if name != "bad.jsonl"}
    assert problems == whole | {("bad.jsonl", 1), ("bad.jsonl", 2), ("lines.jsonl", 2)}
    assert result["files"] == 4
    for problem in result["problems"]:
        line = "" if problem["line"] is None else f", line {problem['line']}"
        assert f"{problem['file']}{line}: skipped: " in captured.err
    with (folder / "huge.txt").open("wb") as huge:
        huge.truncate(2 << 30)  # holes take no room
    assert main(["warm", str(folder / "huge.txt"), str(folder / "ingla.txt"), "--store", str(tmp_path / "kv")]) == 0
    assert "huge.txt: skipped: the file is larger than 1 GiB: split it" in capsys.readouterr().err
    only = fails("warm", folder / "bin.txt", folder / "bad.pdf", "--store", tmp_path / "kv")
    assert "none of 2 files could be read" in only
    assert fails("warm", tmp_path / "kv" / "chunks").rstrip().endswith(".jsonl)"), "the reason once"


def test_warm_refuses_what_the_disk_cannot_hold(
    folder: Path, tmp_path: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=(1 << 30) + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = fails("warm", folder, "--store", tmp_path / "kv")
    assert "has 1.0 GiB free" in message
    assert "must stay free" in message
    assert keys(tmp_path / "kv") == set()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.txt"], "nowhere.txt does not exist"),
        (["{empty}"], "no files with text in"),
        (["{docs}", "--chunk-tokens", "8", "--chunk-overlap", "8"], "--chunk-tokens"),
        (["{docs}", "--embedder", "nobody/nothing"], "cannot load the embedder 'nobody/nothing'"),
    ],
    ids=["missing", "empty", "overlap", "embedder"],
)
def test_errors_of_warm_are_one_line(
    argv: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    fails: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder.__wrapped__)
    (tmp_path / "empty").mkdir()
    argv = [part.format(docs=folder, empty=tmp_path / "empty") for part in argv]
    assert message in fails("warm", *argv, "--store", tmp_path / "kv")


# -------------------------------------------------------------------- ask


def test_ask_finds_the_chunk_and_answers(warmed: Path, as_json: Json) -> None:
    result = as_json("ask", QUESTION, "--store", warmed, *CONTEXT, "--policy", "full")
    assert result["answer"] == ANSWER
    assert any(ANSWER in hit["text"] and hit["document"].endswith("ingla.txt") for hit in result["context"])
    assert result["report"]["reused_tokens"] == 0


def test_ask_reuses_what_was_warmed(warmed: Path, as_json: Json) -> None:
    report = as_json("ask", QUESTION, "--store", warmed, "--ratio", 0.2, "--policy", "first_k")["report"]
    assert report["reused_tokens"] > report["fresh_tokens"] > 0
    assert (report["policy"], report["ratio"]) == ("first_k", 0.2)


def test_the_answer_is_all_there_is_on_stdout(
    warmed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CORPUS.parent)  # names of files below it are shown without it
    assert main(["ask", QUESTION, "--store", str(warmed), *CONTEXT, "--policy", "full"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER + "\n"
    assert "0 reused, 0 stored but recomputed" in captured.err
    assert "first token after" in captured.err
    assert "sources: corpus/ingla.txt" in captured.err


def test_ask_before_warm_says_what_to_do(
    tmp_path: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"`kvrag warm PATH --store {tmp_path / 'kv'}`" in fails("ask", QUESTION, "--store", tmp_path / "kv")
    assert "question is empty" in fails("ask", " ", "--store", tmp_path / "kv")
    assert not (tmp_path / "kv").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Model, "from_pretrained", None)  # not called
    for command in (["ask", QUESTION], ["store", "stats"]):
        assert "run `kvrag warm PATH` first, on this machine" in fails(*command)
    assert not (tmp_path / ".cache" / "kvrag").exists()  # none of them made a store


def test_a_store_that_cannot_be_created_is_reported_in_one_line(folder: Path, fails: Callable[..., str]) -> None:
    for store in (folder / "ingla.txt", folder / "ingla.txt" / "kv"):
        assert ": choose another store folder" in fails("warm", folder, "--store", store)


def test_a_store_of_another_model_is_refused(warmed: Path, fails: Callable[..., str]) -> None:
    message = fails("ask", QUESTION, "--store", warmed, "--dtype", "float32")
    assert "dtype" in message
    assert "load the model with the same settings, use another store folder" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raeder", "cannot load model 'raeder': did you mean reader?"),
        ("gpt2", "cannot load model 'gpt2': pass reader, smollm2, OWNER/NAME on the hub, a folder or a GGUF file"),
        ("./gone", "cannot load model './gone': there is no such folder"),
        (
            "no/body",
            "cannot load model 'no/body': it is not in the local cache and HF_HUB_OFFLINE is set: unset it",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_at_once(name: str, said: str, fails: Callable[..., str]) -> None:
    assert said in fails("verify", "--model", name)


def test_chunks_that_do_not_fit_into_the_window_are_left_out(
    warmed: Path, as_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = as_json("ask", QUESTION, "--top-k", 1000, "--store", warmed)
    assert 10 < len(asked["context"]) < CHUNKS
    assert main(["ask", QUESTION, "--top-k", "1000", "--store", str(warmed), "--max-tokens", "1"]) == 0
    assert f"{len(asked['context'])} of {CHUNKS} chunks fit into the window" in capsys.readouterr().err


def test_a_missing_device_is_reported_in_one_line(fails: Callable[..., str]) -> None:
    assert "unknown device 'gpu'" in fails("warm", CORPUS, "--device", "gpu")
    if not torch.cuda.is_available():
        assert "torch finds no GPU for device 'cuda'" in fails("warm", CORPUS, "--device", "cuda")
    if not torch.backends.mps.is_available():
        assert "torch finds no GPU of Apple's for device 'mps'" in fails("warm", CORPUS, "--device", "mps")


@pytest.mark.parametrize("command", [["verify"], ["warm", "pyproject.toml"]], ids=lambda c: c[0])
def test_an_unknown_model_is_one_line(command: list[str], fails: Callable[..., str]) -> None:
    message = fails(*command, "--model", "nobody/nothing")
    assert "cannot load model 'nobody/nothing'" in message
    assert "HF_HUB_OFFLINE" in message


@pytest.mark.parametrize("command", ["ask Who? --max-tokens 1", "explain Who?", "warm README.md"])
def test_the_bundled_reader_says_that_it_knows_only_its_own_world(
    command: str, warmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(warmed, tmp_path / "kv")
    assert main([*command.split(), "--store", str(tmp_path / "kv")]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("model: reader, ")]
    assert len(told) == 1
    assert "pass a model of the hub, such as --model " in told[0]


# -------------------------------------------------------------------- store


def test_store_stats_and_gc(warmed: Path, as_json: Json) -> None:
    stats = as_json("store", "stats", "--store", warmed)
    assert stats["chunks"] == len(keys(warmed)) == CHUNKS, "a short one, which is never reused, can be forgotten"
    assert stats["documents"] == 30
    assert stats["model"] == "reader"
    assert as_json("store", "gc", "--store", warmed) == {"chunks": 0, "files": 0}


CHECKED = {"sound": 0, "damaged": 0, "unreadable": 0}


def test_store_check_reports_damage_once(folder: Path, tmp_path: Path, as_json: Json) -> None:
    store = tmp_path / "kv"
    command = ("warm", folder, "--store", store, *CUT)
    as_json(*command)
    assert as_json("store", "check", "--store", store) == {**CHECKED, "sound": 6}
    victim = next((store / "chunks").glob("*/*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert as_json("store", "check", "--store", store, code=1) == {**CHECKED, "sound": 5, "damaged": 1}
    assert as_json(*command)["new"] == 1
    assert as_json("store", "check", "--store", store) == {**CHECKED, "sound": 6}


def test_looking_at_a_store_makes_none(tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "has no store" in fails("store", "stats", "--store", tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


# -------------------------------------------------------------------- calibrate


@pytest.fixture
def own(warmed: Path, tmp_path: Path) -> Path:
    """A copy of the warmed store, which tests may change."""
    return Path(shutil.copytree(warmed, tmp_path / "own"))


def test_warm_can_calibrate_as_well(tmp_path: Path, as_json: Json, fails: Callable[..., str]) -> None:
    (tmp_path / "a.md").write_text(
        "The north tower has a blue door. It was painted by Arno in the spring of that year."
    )
    (tmp_path / "b.md").write_text(
        "The south tower has a green door. It was painted by Bela in the autumn of that year."
    )
    store = tmp_path / "kv"
    assert as_json("warm", tmp_path / "a.md", tmp_path / "b.md", "--store", store, "--tune")["tuned"]
    with closing(FileStore(store)) as counted:
        assert sum(counted.counts("evidence ").values()) > 0
    assert "--tune is for a local store" in fails("warm", tmp_path, "--server", "http://localhost:1", "--tune")


def test_the_controller_can_be_switched_off(own: Path, as_json: Json) -> None:
    assert as_json("ask", QUESTION, "--store", own)["report"]["decision"]
    report = as_json("ask", QUESTION, "--store", own, "--controller", "off")["report"]
    assert (report["policy"], report["decision"]) == (DEFAULT_POLICY, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_only_this_machine_is_served_without_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRAG_API_KEY", raising=False)
    settings = serve.read_settings(_parser(["serve"]).parse_args(["serve", "--host", host]))
    assert "localhost" in settings.hosts
    assert not settings.api_keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu-server", ""])
def test_beyond_this_machine_a_key_is_needed_or_an_option(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRAG_API_KEY", raising=False)
    words = ["serve", "--host", host]
    with pytest.raises(SettingError, match=r"--api-key or set KVRAG_API_KEY, or .* --no-api-key"):
        serve.read_settings(_parser(["serve"]).parse_args(words))
    assert not serve.read_settings(_parser(["serve"]).parse_args([*words, "--no-api-key"])).api_keys
    monkeypatch.setenv("KVRAG_API_KEY", "secret")
    assert serve.read_settings(_parser(["serve"]).parse_args(words)).api_keys
    with pytest.raises(SettingError, match="--no-api-key contradicts"):
        serve.read_settings(_parser(["serve"]).parse_args([*words, "--no-api-key"]))
