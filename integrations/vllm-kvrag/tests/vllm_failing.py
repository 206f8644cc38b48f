"""A worker of vLLM's that fails in a forward pass, in one of two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_kvrag import Worker
from vllm_kvrag.backend import PagedCache, VllmBackend

POINTS = {"stitch": (PagedCache, "lay_out"), "prepare": (VllmBackend, "_metadata"), "pack": (VllmBackend, "gather")}


class FailingWorker(Worker):
    """The second process fails once at the point that is named in the file `KVRAG_FAIL`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and change kvrag in the second process."""
        super().load_model(*args, **kwargs)
        if self.rank == 1:
            for point, (owner, name) in POINTS.items():
                setattr(owner, name, failing(point, getattr(owner, name)))


def failing(point: str, work: Any) -> Any:
    """Return `work`, which fails once if the file names the point."""
    file = Path(os.environ["KVRAG_FAIL"])

    def work_or_fail(self: Any, value: Any, *args: Any) -> Any:
        is_inside = point != "stitch" or value == 1  # a layer that the pass reaches after a collective
        if is_inside and file.read_text() == point:
            file.write_text("")
            if point == "pack":
                value = (lambda: None,)  # cannot be pickled
            else:
                raise MemoryError("in one process")
        return work(self, value, *args)

    return work_or_fail
