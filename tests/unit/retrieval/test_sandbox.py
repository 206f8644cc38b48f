"""The child process that reads files: its limits, its end, and what it loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hostile
import pytest

from kvrag import KvragError
from kvrag.retrieval import documents, sandbox
from kvrag.retrieval.content import Content
from kvrag.retrieval.sandbox import Sandbox


@pytest.fixture
def child() -> Iterator[Sandbox]:
    with closing(Sandbox()) as child:
        yield child


def is_next_read(child: Sandbox) -> bool:
    return child.parse("next.txt", ".txt", b"text") == Content("next.txt", ["text"])


def test_the_child_reads_what_this_process_does(child: Sandbox, tmp_path: Path) -> None:
    files = [
        ("a.html", "<p>ä <b>b</b></p>".encode()),
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n'),
        ("a.docx", b"no zip"),
        ("a.csv", "naïve,b\n1,2".encode("cp1252")),
    ]
    for name, content in files:
        kind = Path(name).suffix
        found, wanted = child.parse(name, kind, content), documents.parse(name, kind, content)
        assert (found.texts, found.pages, found.problems) == (wanted.texts, wanted.pages, wanted.problems)
        assert found.texts or found.problems
    (tmp_path / "a.txt").write_text("text")
    assert documents.read(tmp_path / "a.txt", parse=child.parse).texts == ["text"]


def test_a_file_that_takes_too_long_is_skipped(child: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 1)
    monkeypatch.setattr(sandbox, "_SECONDS_PER_MIB", 0)
    content = hostile.FILES[".pdf", "4,000,000 operators"]()
    [problem] = child.parse("a.pdf", ".pdf", content).problems
    assert str(problem) == "a.pdf: skipped: reading it takes longer than 1 s: split it"
    monkeypatch.undo()
    assert is_next_read(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no limit of memory")
def test_a_file_that_takes_too_much_memory_is_skipped(child: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BYTES", 200 << 20)
    content = hostile.epub("<p>x</p>", 1_000_000)  # its list of chapters is a tree
    found = child.parse("a.epub", ".epub", content)
    assert not found.texts
    [problem] = found.problems
    assert "reading it takes too much memory" in str(problem)
    monkeypatch.undo()
    assert is_next_read(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no limit of memory")
def test_a_file_that_does_not_fit_into_memory_is_skipped(child: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BYTES", 100 << 20)
    assert is_next_read(child)
    large = b"x" * (20 << 20)  # a small file before it leaves no small limit
    assert len(child.parse("a.txt", ".txt", large).texts[0]) == len(large)
    monkeypatch.setattr(sandbox, "_BYTES_PER_BYTE", 0)
    for size in (30 << 20, 100 << 20):  # the answer does not fit; the content does not
        [problem] = child.parse("a.txt", ".txt", b"x" * size).problems
        assert problem.message == "skipped: reading it takes too much memory: split it"
    monkeypatch.undo()
    assert is_next_read(child)


def test_a_crash_is_reported_and_the_next_file_is_read(child: Sandbox) -> None:
    assert is_next_read(child)
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGSEGV)
    [problem] = child.parse("a.pdf", ".pdf", b"%PDF-").problems
    assert "too much memory, or crashes (SIGSEGV): save it anew, or split it" in problem.message
    assert is_next_read(child)


def test_a_package_that_is_missing_is_an_error(child: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lxml.py").write_text("raise ImportError('no lxml', name='lxml')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KvragError, match=r"lxml is not installed: pip install 'kvrag\[cli\]'"):
        child.parse("a.docx", ".docx", hostile.docx(""))
    assert is_next_read(child)


def test_a_child_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "csv.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(Sandbox()) as child, pytest.raises(KvragError, match="the process that reads files failed"):
        child.parse("a.txt", ".txt", b"text")


def test_the_child_imports_neither_torch_nor_numpy() -> None:
    command = "import sys, kvrag.retrieval.sandbox; print({'torch', 'numpy', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_child_is_left(child: Sandbox) -> None:
    assert is_next_read(child)
    process = child._process
    assert process is not None
    child.close()
    assert process.returncode is not None
