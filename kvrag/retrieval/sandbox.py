"""Reading files in a child process with limits of time and memory: a hostile or broken file takes only the child down.

The child is this module. For each file it gets a line of JSON and the file's content, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kvrag.errors import KvragError
from kvrag.retrieval.content import Content, Problem
from kvrag.retrieval.documents import parse

_SECONDS, _SECONDS_PER_MIB = 60, 20  # a PDF of 1 MiB may have 1000 pages
_BYTES, _BYTES_PER_BYTE = 2 << 30, 16  # of memory; parsed XML of 64 MiB takes 1.3 GiB
_NO_MEMORY = 3  # status of a child that ran out of it
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each would take address space


class Sandbox:
    """A child process that reads files, one at a time. It starts with the first file, and after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:  # waits, and closes the pipes, one of which may have a rest
                pass

    def parse(self, name: str, kind: str, content: bytes, text_field: str = "text") -> Content:
        """Do what `documents.parse` does; a file that exceeds the limits is a problem.

        Raises:
            KvragError: A package for its kind is not installed, or the child cannot start.
        """
        mib = -(-len(content) // (1 << 20))
        seconds, memory = _SECONDS + _SECONDS_PER_MIB * mib, _BYTES + _BYTES_PER_BYTE * len(content)
        asked = {"size": len(content), "seconds": seconds, "memory": memory, "arguments": [name, kind, text_field]}
        if self._process is None:
            # the child imports what this process does, from where it does
            paths = os.pathsep.join(map(os.path.abspath, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths},
            )
        try:
            answer = _ask(self._process, json.dumps(asked).encode() + b"\n", content)
            status = 0 if answer else self._process.wait()
        except BaseException:  # an interruption leaves half of an answer
            self.close()
            raise
        if answer is not None:
            if "error" in answer:
                raise KvragError(answer["error"])
            problems = [Problem(**problem) for problem in answer.pop("problems")]
            return Content(**answer, problems=problems)
        self.close()
        if status == -signal.SIGXCPU:
            why = f"reading it takes longer than {seconds} s: split it"
        elif status == 1:  # an exception of Python, printed above
            raise KvragError("the process that reads files failed: see the error above, and reinstall kvrag")
        elif status == _NO_MEMORY:
            why = "reading it takes too much memory: split it"
        else:
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            why = f"reading it takes too much memory, or crashes ({how}): save it anew, or split it"
        return Content(name, problems=[Problem(name, f"skipped: {why}")])


def _ask(process: subprocess.Popen[bytes], *question: bytes) -> dict[str, Any] | None:
    """Return the child's answer; None if it died."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.writelines(question)
        process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _limit(seconds: int, memory: int) -> None:
    """Set this process's limits."""
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: int(time.process_time()) + seconds + 1}
    for kind, limit in limits.items():
        most = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def main() -> None:
    """Read files until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # a library that prints must not write an answer
        while line := sys.stdin.buffer.readline():
            asked = json.loads(line)
            _limit(asked["seconds"], asked["memory"])
            try:
                answers.write(_answer(sys.stdin.buffer.read(asked["size"]), *asked["arguments"]) + b"\n")
            except MemoryError:
                os._exit(_NO_MEMORY)  # a normal end may take memory, too
            answers.flush()


def _answer(content: bytes, name: str, kind: str, text_field: str) -> bytes:
    try:
        parsed = parse(name, kind, content, text_field)
    except KvragError as error:
        return json.dumps({"error": str(error)}).encode()
    problems = [asdict(problem) for problem in parsed.problems]
    return json.dumps({"file": name, "texts": parsed.texts, "pages": parsed.pages, "problems": problems}).encode()


if __name__ == "__main__":
    main()
