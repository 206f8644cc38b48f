"""Files of kvrag that one `engine.generate` runs through, and their lines."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import kvrag
from kvrag import BlendEngine, FileStore, Model

ROOT = Path(kvrag.__file__).resolve().parent
CHUNKS = [
    f"In the year {1700 + number} the harbour of Brindle was enlarged by {number + 3} rooms, and "
    f"{7 * number + 11} people came to see it on the first day of spring."
    for number in range(4)
]


def main() -> None:
    """Trace one answer of the bundled reader with reused chunks; print files and lines."""
    executed: set[str] = set()

    def trace(frame: FrameType, *_: object) -> None:
        executed.add(frame.f_code.co_filename)

    def prompt(chunks: Sequence[str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": "\n\n".join([*chunks, "How many rooms?"])}]

    model = Model.from_pretrained(str(ROOT / "reader"))
    with tempfile.TemporaryDirectory() as folder, BlendEngine(model, FileStore(folder, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS, document="a")
        engine.generate(prompt(CHUNKS[::-1]), max_new_tokens=4)  # in another order, so that no prefix is reused
        threading.settrace(trace)
        sys.settrace(trace)
        report = engine.generate(prompt(CHUNKS), max_new_tokens=4).report
        sys.settrace(None)
    files = sorted(path for path in map(Path, executed) if path.is_relative_to(ROOT))
    lines = [len(path.read_text().splitlines()) for path in files]
    for path, count in zip(files, lines, strict=True):
        print(f"{count:6} {path.relative_to(ROOT)}")
    print(f"{len(files)} files, {sum(lines)} lines; {report.reused_tokens} of {report.prompt_tokens} tokens reused")


if __name__ == "__main__":
    main()
