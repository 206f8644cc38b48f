"""What several commands share: arguments, opening, progress, wording."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.config import CODECS, CONTROLLERS, DEFAULT_POLICY, DEFAULT_RATIO, POLICIES
from kvrag.errors import KvragError, StoreError
from kvrag.types import BlendReport, Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.store import FileStore

DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Model and store."""
    parser.add_argument(
        "--model", default="reader", help="hub name, folder, or 'reader', which comes with kvrag (default: reader)"
    )
    parser.add_argument("--store", help="folder of the pre-encoded chunks (default: one per model in ~/.cache/kvrag)")
    parser.add_argument(
        "--codec", choices=CODECS, default="native", help="how chunks are stored: as they are, or in 8 or 4 bits"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="to compute in (default: auto, as stored)")
    parser.add_argument("--device", help="cuda, cpu, ... (default: a GPU if there is one)")


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Retrieval and blending."""
    parser.add_argument("--top-k", type=int, default=4, metavar="K", help="chunks to retrieve (default: 4)")
    parser.add_argument(
        "--around", type=int, default=0, metavar="N", help="neighbours that come along with each chunk (default: 0)"
    )
    parser.add_argument(
        "--ratio",
        type=float,
        metavar="R",
        help=f"share of the reused tokens to recompute, 0 to 1 (default: as calibrated, else {DEFAULT_RATIO})",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        help=f"which tokens to recompute; 'full' = ordinary prefill (default: {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--controller",
        choices=CONTROLLERS,
        help="'off' = no full prefill where that is predicted to be sooner (default: auto)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 = always the likeliest token (default: as the model says)"
    )


def stream(engine: BlendEngine, prompt: str | Messages, args: argparse.Namespace) -> tuple[str, BlendReport]:
    """Answer as `add_answer_arguments` say, printed as it comes unless --json was given."""
    text, report = "", None
    settings = {"ratio": args.ratio, "policy": args.policy, "controller": args.controller}
    settings["temperature"] = args.temperature
    for delta in engine.stream(prompt, max_new_tokens=args.max_tokens, **settings):
        piece = delta.text if text else delta.text.lstrip()
        text += piece
        report = delta.report or report
        if not args.json:
            print(piece, end="", flush=True)
    if not args.json:
        print()
    assert report is not None
    return text.strip(), report


def open_engine(args: argparse.Namespace, **config: Any) -> BlendEngine:
    """The engine that the arguments describe, with these fields of its `BlendConfig`."""
    from kvrag.config import BlendConfig
    from kvrag.engine import BlendEngine

    return BlendEngine.from_pretrained(
        args.model,
        store=args.store,
        config=BlendConfig(**config),
        codec=args.codec,
        dtype=args.dtype,
        device=args.device,
    )


def folder(engine: BlendEngine) -> FileStore:
    """The engine's store, which is a folder whenever the command line has opened it."""
    from kvrag.store import FileStore

    assert isinstance(engine.store, FileStore)
    return engine.store


def open_index(engine: BlendEngine, embedder: str | None = None) -> ChunkIndex:
    """The chunk index beside the engine's chunks."""
    from kvrag.retrieval.index import ChunkIndex

    return ChunkIndex(folder(engine).path / "index.sqlite", embedder)


def require_chunks(index: ChunkIndex) -> None:
    """Raise unless something was warmed."""
    if not len(index):
        raise StoreError(
            f"there is nothing to ask about in {index.path.parent}: run `kvrag warm PATH` first, "
            "with the same --model and --store"
        )


def require_extra() -> None:
    """Raise unless everything is there that reading, retrieving and showing need: loading the model takes a while."""
    for module in ("rich", "faiss", "sentence_transformers", "langchain_text_splitters"):
        if find_spec(module) is None:
            raise KvragError(f"{module} is not installed: pip install 'kvrag[cli]'")


def existing_store(path: str) -> Path:
    """The folder of a store that is there: opening another one would create it.

    Raises:
        StoreError: There is none.
    """
    folder = Path(path).expanduser()
    if not (folder / "chunks").is_dir():
        raise StoreError(f"there is no store in {folder}: `kvrag warm PATH --store {folder}` makes one")
    return folder


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        KvragError: It is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise KvragError(f"{path} is not UTF-8 text (byte {error.start})") from None


def say(message: str) -> None:
    """A line for people: never on stdout, which belongs to the result."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, fed with (done, total); nothing if `quiet` or where nobody watches."""
    missing_extra = KvragError("rich is not installed: pip install 'kvrag[cli]'")
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        raise missing_extra from None
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def human_bytes(size: float) -> str:
    """With three digits or so: 28.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def summary(report: BlendReport) -> str:
    """One line about an answer."""
    line = (
        f"{report.prompt_tokens} prompt tokens: {report.reused_tokens} reused ({report.recomputed_tokens} of them "
        f"recomputed), {report.fresh_tokens} fresh; first token after {report.ttft_s * 1000:.0f} ms ({report.policy})"
    )
    return "\n".join(filter(None, [line, report.decision, *report.notes]))
