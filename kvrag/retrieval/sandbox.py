"""Reading files in a child process with limits of time and memory: a hostile or broken file takes only the child down.

The child is this module. For each file it gets limits and content, and answers with what `documents.parse` does.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

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
        self._pipe: Connection

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._pipe, its = Pipe()
        # the child imports what this process does, from where it does
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        with its:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(its.fileno())],
                pass_fds=[its.fileno()],
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths},
            )

    def parse(self, name: str, kind: str, content: bytes) -> Content:
        """Do what `documents.parse` does; a file that exceeds the limits is a problem.

        Raises:
            KvragError: A package for its kind is not installed, or the child cannot start.
        """
        mib = -(-len(content) // (1 << 20))
        seconds, memory = _SECONDS + _SECONDS_PER_MIB * mib, _BYTES + _BYTES_PER_BYTE * len(content)
        self._process = process = self._process or self._start()
        try:
            self._pipe.send((seconds, memory, name, kind))
            self._pipe.send_bytes(content)
            answer: Content | KvragError = self._pipe.recv()
        except (EOFError, OSError):  # it has ended
            status = process.wait()
        except BaseException:  # an interruption leaves half of an answer
            self.close()
            raise
        else:
            if isinstance(answer, KvragError):
                raise answer
            return answer
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
    os.dup2(2, 1)  # a library that prints must not add to the results of a command
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            seconds, memory, name, kind = pipe.recv()
            _limit(seconds, memory)
            try:
                pipe.send(parse(name, kind, pipe.recv_bytes()))
            except KvragError as error:
                pipe.send(error)
            except MemoryError:
                os._exit(_NO_MEMORY)  # a normal end may take memory, too


if __name__ == "__main__":
    main()
