"""Files of kvrag that one answer runs through, and how often it goes from one of them to another."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import langchain_kvrag
from langchain_kvrag import ChatBlend

import kvrag
from kvrag import BlendEngine, FileStore, Model

ROOT = Path(kvrag.__file__).resolve().parent
ADAPTER = Path(langchain_kvrag.__file__).resolve().parent
CHUNKS = [
    f"In the year {1700 + number} the harbour of Brindle was enlarged by {number + 3} rooms, and "
    f"{7 * number + 11} people came to see it on the first day of spring."
    for number in range(4)
]


def _prompt(chunks: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*chunks, "How many rooms?"])}]


def _traced(call: Callable[[], Any], until: CodeType | None = None) -> tuple[Any, list[Path]]:
    """Return the result of a call, and the file of each line that it runs in this thread, up to the code `until`."""
    seen: list[str] = []
    is_reached = False

    def trace(frame: FrameType, *_: object) -> Any:
        nonlocal is_reached
        is_reached |= frame.f_code is until
        if not is_reached and frame.f_code.co_filename.startswith((str(ROOT), str(ADAPTER))):
            seen.append(frame.f_code.co_filename)
        return trace

    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(None)
    return result, [Path(name) for name, _ in groupby(seen)]


def _show(title: str, path: Sequence[Path]) -> None:
    """Print the files of a path with their lines and how often each is entered."""
    entered = Counter(path)
    lines = {file: len(file.read_text().splitlines()) for file in sorted(entered)}
    print(f"{title}: {len(lines)} files, {sum(lines.values())} lines, {len(path) - 1} changes of file")
    for file, count in lines.items():
        base = ROOT if file.is_relative_to(ROOT) else ADAPTER
        print(f"{count:6} lines, entered {entered[file]:4} times: {file.relative_to(base.parent)}")


def main() -> None:
    """Trace answers of the bundled reader with reused chunks; print files, lines and changes of file."""
    model = Model.from_pretrained(str(ROOT / "reader"))
    with tempfile.TemporaryDirectory() as folder, BlendEngine(model, FileStore(folder, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS, document="a")
        engine.generate(_prompt(CHUNKS[::-1]), max_new_tokens=4)  # in another order, so that no prefix is reused
        answer, path = _traced(lambda: engine.generate(_prompt(CHUNKS), max_new_tokens=4))
        _show("generate()", path)
        print(f"{answer.report.reused_tokens} of {answer.report.prompt_tokens} tokens reused")
        llm = ChatBlend(engine=engine, max_tokens=4)
        llm.invoke("How many rooms?")
        _, path = _traced(lambda: llm.invoke("How many rooms?"))
        _show("ChatBlend.invoke()", path)
        _, path = _traced(lambda: llm.invoke("How many rooms?"), BlendEngine.generate.__code__)
        _show("ChatBlend.invoke() before the engine is reached", path)


if __name__ == "__main__":
    main()
