"""One server works on a corpus at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvrag import StoreReadOnlyError
from kvrag.server.corpus import Corpus, CorpusInUseError, CorpusTask

OPEN = """
import sys
from pathlib import Path
from kvrag.server.corpus import Corpus
Corpus(None, None, Path(sys.argv[1]), list)
"""


def _opened(folder: Path) -> Corpus:
    unused: Any = None
    return Corpus(unused, unused, folder, list)


def test_a_second_server_is_refused_until_the_first_has_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    first = _opened(folder)
    with pytest.raises(CorpusInUseError, match="another server uses the corpus"):
        _opened(folder)
    stopping = threading.Thread(target=first.stop, args=(0,))  # as the server does, in another thread
    stopping.start()
    stopping.join()
    _opened(folder).stop(0)


def test_unfinished_tasks_are_adopted_from_stopped_servers_only(tmp_path: Path) -> None:
    first, second, third = (_opened(tmp_path / name) for name in ("corpus", "corpus-1", "corpus-2"))
    for corpus, document in ((second, "b"), (third, "c")):
        corpus._write(CorpusTask(1, "add", document, ["text"]))
    second.stop(0)
    first.adopt()
    assert list(first._latest()) == ["b"]


@pytest.mark.slow
def test_another_process_is_refused_as_well(tmp_path: Path) -> None:
    first = _opened(tmp_path / "corpus")
    done = subprocess.run([sys.executable, "-c", OPEN, str(tmp_path / "corpus")], capture_output=True, text=True)
    assert "CorpusInUseError: another server uses the corpus" in done.stderr
    first.stop(0)


def test_a_folder_that_is_not_writable_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreReadOnlyError, match="is not writable"):
        _opened(tmp_path / "file" / "corpus")
