"""Shared parts of the commands: options, opening a store, progress bars, formatting."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvrag.backend.hub import READER, check_model
from kvrag.config import (
    DEFAULT_CONTEXT,
    DEFAULT_POLICY,
    OF_GGUF,
    BlendConfig,
    EngineOptions,
    declared,
)
from kvrag.errors import KvragError, SettingError, StoreError
from kvrag.llm import SETTINGS
from kvrag.progress import progress as progress

if TYPE_CHECKING:
    from kvrag.backend.transformers import Model
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.store import KVStore

T = TypeVar("T")

_KINDS = {kind.__name__: kind for kind in (bool, float, int, str)}
LOADED = ("dtype", "device", "quantization", "store_states", *OF_GGUF)
"""Options of the model."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
_EXTRAS = {
    "cli": ("faiss", "sentence_transformers", "langchain_text_splitters"),
    "server": ("fastapi", "uvicorn", "prometheus_client"),
}


def checked(kind: Callable[[str], T], check: Callable[[T], object]) -> Callable[[str], T]:
    """Return a type for argparse whose values must pass a check, which raises SettingError.

    Wrong values are reported while the arguments are read, before torch is imported and a model is loaded.
    """

    def parse(text: str) -> T:
        value = kind(text)
        try:
            check(value)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    parse.__name__ = getattr(kind, "__name__", "")  # argparse reports it if `kind` fails
    return parse


def at_least(least: float, kind: Callable[[str], Any] = int, most: float = math.inf) -> Callable[[str], Any]:
    """Return a type for argparse: a finite number from `least` to `most`."""

    def check(value: float) -> None:
        if not (least <= value <= most and value < math.inf):
            wanted = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise SettingError(f"must be {wanted}, got {value}")

    return checked(kind, check)


def add_number(
    parser: argparse._ActionsContainer,
    name: str,
    default: Any,
    what: str,
    least: float = 0,
    most: float = math.inf,
    **options: Any,
) -> None:
    """Add an option for a number of the default's type, with the default in its help unless that is None.

    Args:
        options: Further arguments of `add_argument`; with a `type`, the bounds and the default's type do not count.
    """
    options.setdefault("type", at_least(least, type(default), most))
    options.setdefault("metavar", "N")
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument(name, default=default, help=f"{what}{shown}", **options)


def add_corpus_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of splitting documents, encoding their chunks, and retrieval."""
    # shorter chunks would be stored, but never reused
    add_number(parser, "--chunk-tokens", 256, "maximum tokens per chunk", least=BlendConfig().min_run)
    add_number(parser, "--chunk-overlap", 0, "overlap of adjacent chunks in tokens")
    context = "encode chunks with N preceding tokens as context, to resolve pronouns and references; 0 = alone"
    add_number(parser, "--context-tokens", DEFAULT_CONTEXT, context)
    parser.add_argument("--embedder", help="sentence-transformers model for retrieval (default: the one in kvrag[cli])")


def add_setting(parser: argparse.ArgumentParser, name: str, about: str | None = None, **options: Any) -> None:
    """Add the option for a setting in `kvrag.llm`, with its type, default and check.

    Args:
        about: Help text that replaces the setting's own.
        options: Further arguments of `add_argument`.
    """
    setting = SETTINGS[name]
    check, kind = setting.metadata["check"], _KINDS[str(setting.type).partition(" ")[0]]
    options.setdefault("default", setting.default)
    if kind is bool:
        options["action"] = "store_true"
    else:
        choices = options.setdefault("choices", setting.metadata.get("choices"))
        options["type"] = kind if choices else checked(kind, partial(check, name))
        options.setdefault("metavar", "N" if kind is int else None)
    default = f" (default: {options['default']})" if options["default"] not in (None, False, "") else ""
    about = about or setting.metadata["about"]
    parser.add_argument(f"--{name.replace('_', '-')}", help=f"{about}{default}", **options)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model."""
    add_setting(parser, "model", default=READER)
    add_setting(parser, "dtype", choices=DTYPES)
    for name in LOADED[1:]:
        add_setting(parser, name)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, the store and the namespace."""
    add_model_arguments(parser)
    add_setting(parser, "store", metavar="STORE")
    add_setting(parser, "store_cache", metavar="FOLDER")
    add_setting(parser, "codec")
    namespace = "namespace of the documents and chunks; other namespaces never see them"
    add_setting(parser, "namespace", namespace, metavar="NAME")


def add_blend_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of blending."""
    add_setting(parser, "ratio", metavar="R")
    add_setting(parser, "margin", metavar="NATS")
    add_setting(parser, "policy", f"{SETTINGS['policy'].metadata['about']} (default: {DEFAULT_POLICY})")
    add_setting(parser, "controller")


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of retrieval, blending and sampling."""
    add_number(parser, "--top-k", 4, "chunks to retrieve", least=1)
    add_number(parser, "--around", 0, "neighbours to retrieve with each chunk")
    add_blend_arguments(parser)
    add_setting(parser, "max_tokens")
    add_setting(parser, "temperature", metavar="T")


def read_config(args: argparse.Namespace) -> BlendConfig:
    """Return the configuration of the engine by the command's options of encoding and blending."""
    return BlendConfig(context_tokens=getattr(args, "context_tokens", DEFAULT_CONTEXT)).overridden(vars(args))


def open_engine(args: argparse.Namespace, *, is_warmed: bool = False) -> BlendEngine:
    """Open the engine for `add_engine_arguments`, and for the command's other options of model and engine.

    Args:
        is_warmed: Create no store.

    Raises:
        StoreError: There is no store, with `is_warmed`.
    """
    check_model(args.model)
    if args.store is not None:  # before the slow imports
        if is_warmed:
            existing_store(args.store)
    elif is_warmed and not any((cache := Path.home() / ".cache" / "kvrag").glob("*/chunks")):
        raise nothing_warmed(cache)
    config = read_config(args)
    from kvrag.engine import BlendEngine, default_store

    model = load_model(args)
    store = default_store(model, args.codec) if args.store is None else args.store
    if is_warmed and args.store is None and not (store / "chunks").is_dir():
        raise nothing_warmed(store)
    options: Any = {name: getattr(args, name) for name in declared(EngineOptions) if name in args}
    return BlendEngine(model, store, config, **options)


def load_model(args: argparse.Namespace, **options: Any) -> Model:
    """Load the model of `add_model_arguments`, with further options of `Model.from_pretrained`."""
    from kvrag.backend.transformers import Model

    if args.model == READER:
        say(
            f"model: {READER}, the bundled one, which knows only the made-up world of examples/corpus. For your "
            "own documents pass a model of the hub, such as --model Qwen/Qwen2.5-1.5B-Instruct"
        )
    options |= {name: getattr(args, name) for name in LOADED}
    return Model.from_pretrained(args.model, **options)


def open_index(store: KVStore, namespace: str, embedder: str | None = None) -> ChunkIndex:
    """Open this machine's chunk index of a namespace; that of the namespace "" is in the store's own folder."""
    from kvrag.retrieval.index import ChunkIndex

    folder = store.path
    if namespace:
        # a namespace can be longer than a file name and contain any character
        folder = folder / "namespaces" / blake2b(namespace.encode(), digest_size=16).hexdigest()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return ChunkIndex(folder / "index.sqlite", embedder)


def nothing_warmed(folder: Path) -> StoreError:
    """Return the error for a folder without documents."""
    return StoreError(
        f"{folder} has no warmed documents: run `kvrag warm PATH` first, on this machine (it encodes nothing that a "
        "shared store has already), with the same --model, --store and --namespace"
    )


def require_extra(extra: str = "cli") -> None:
    """Raise KvragError if the extra, by default the one for reading and retrieval, is not installed."""
    for module in _EXTRAS[extra]:
        if find_spec(module) is None:
            raise KvragError(f"{module} is not installed: pip install 'kvrag[{extra}]'")


def existing_store(store: str) -> str:
    """Return the folder or URL of an existing store; opening a missing one would create it.

    Raises:
        StoreError: There is no store.
    """
    if ":" in store:  # importing torch takes seconds
        from kvrag.store.shared import connect, is_shared

        if is_shared(store):
            remote = connect(store)
            if remote.read(["fingerprint.json"]) == [None]:
                raise StoreError(f"{remote.url} has no store: create one with `kvrag warm PATH --store {remote.url}`")
            return store
    folder = Path(store).expanduser()
    if not (folder / "chunks").is_dir():
        raise StoreError(f"{folder} has no store: create one with `kvrag warm PATH --store {folder}`")
    return str(folder)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        KvragError: The file is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise KvragError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from None


def say(message: str) -> None:
    """Print a line to stderr; stdout is reserved for results."""
    print(message, file=sys.stderr, flush=True)
