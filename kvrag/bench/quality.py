"""Answer quality of policies, ratios, chunk lengths, the preamble and codecs, compared with full prefill.

Every prompt is prefilled in full once and then once per cell of the grid, in an order that changes from row to row.
Answers are greedy. Times run from messages to the first token; the KV comes from the RAM tier unless it is off.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.bench.datasets import Row, rechunk
from kvrag.bench.grid import (
    ACROSS,
    AS_THEY_ARE,
    FULL,
    HIDDEN,
    NONE,
    NOT_RETRIEVED,
    RETRIEVED,
    RIGHT,
    WITHIN,
    Asking,
    Cell,
    Setup,
)
from kvrag.bench.metrics import Bootstrap, Interval, Values, divergence, exact_match, normalise, rouge_l, token_f1
from kvrag.bench.ttft import run_settings
from kvrag.config import BlendConfig, Sampling
from kvrag.control.calibrate import wilson
from kvrag.control.prompts import first_word, render
from kvrag.engine import BlendEngine
from kvrag.errors import ContextWindowError, KvragError, ModelError, PromptError, SettingError
from kvrag.generate.decode import decode
from kvrag.types import Messages

_PORTION_BYTES = 1 << 30  # chunks are warmed and forgotten in portions of about this size on disk
_LIBRARY_BYTES = 16 << 30  # ... where rows share documents, which would be encoded again in every portion
_CODE = ("backend", "reuse", "ingest", "store", "generate", "request.py", "answer.py", "config.py")
_METRICS = {"em": exact_match, "f1": token_f1, "rouge_l": rouge_l}
_AGAINST_FULL = ("agree", "kl", "same", "word")  # first token, first token's distribution, answer, first word


# --------------------------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Task:
    """A row that fits: its chunks and its prompt, as text, messages or token ids, per chunk length.

    Attributes:
        tokens: Length of the longest prompt.
        hidden: Answers that the prompt does not contain, and that a chunk before one of its chunks in the same document
            does: the model can only know them from the KV.
    """

    row: Row
    chunks: dict[int, tuple[str, ...]]
    prompts: dict[int, str | Messages | list[int]]
    tokens: int
    hidden: tuple[str, ...]


def make_tasks(
    model: Model, rows: Sequence[Row], lengths: Sequence[int], asking: Asking, skip_long: bool = False
) -> tuple[list[Task], int]:
    """Build every prompt once.

    Returns:
        The tasks, and the number of skipped rows.

    Raises:
        ContextWindowError: A row does not fit into the window, and `skip_long` is not set.
    """
    tasks, skipped = [], 0
    for row in rows:
        try:
            tasks.append(_task(model, row, lengths, asking))
        except ContextWindowError:
            if not skip_long:
                raise
            skipped += 1
        except PromptError as error:
            raise PromptError(f"row {row.id}: {error}") from error
    if not tasks:
        raise ContextWindowError(
            f"none of {len(rows)} rows fits into the window of {model.name} ({model.context_window}): shorten them"
        )
    return tasks, skipped


def _task(model: Model, row: Row, lengths: Sequence[int], asking: Asking) -> Task:
    if row.beginning:
        ids = render(model.tokenizer, row.passages, row.beginning)
        return Task(row, {}, {AS_THEY_ARE: ids}, len(ids), ())
    chunks: dict[int, tuple[str, ...]] = {}
    prompts: dict[int, str | Messages | list[int]] = {}
    longest, hidden = 0, tuple[str, ...]()
    for length in lengths:
        cut = rechunk(row.passages, length, lambda text: len(model.tokenizer.encode(text))) if length else row.passages
        retrieved = _retrieved(cut, asking.missing, row.key)
        text = "\n\n".join([*retrieved, *filter(None, [asking.instruction]), f"Question: {row.question}"])
        text += "" if model.tokenizer.has_chat_template else "\n\nAnswer:"
        chunks[length], prompts[length] = cut, model.tokenizer.as_prompt(text)
        longest = max(longest, len(_ids(model, prompts[length])))
        hidden = hidden if length else _hidden(row, retrieved)
    if longest + asking.max_tokens > model.context_window:
        raise ContextWindowError(
            f"row {row.id} has a prompt of {longest} tokens, which with {asking.max_tokens} for the answer do not fit "
            f"into the window of {model.name} ({model.context_window}): shorten it, or skip such rows (--skip-long)"
        )
    return Task(row, chunks, prompts, longest, hidden)


def _ids(model: Model, prompt: str | Messages | list[int]) -> list[int]:
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else model.tokenizer.render(prompt)


def _retrieved(chunks: Sequence[str], missing: float, seed: str) -> list[str]:
    """Return the chunks without a random share of them; at least one is kept."""
    rng = random.Random(seed)
    return [chunk for chunk in chunks if rng.random() >= missing] or [rng.choice(chunks)]


def _hidden(row: Row, retrieved: Sequence[str]) -> tuple[str, ...]:
    """Return `Task.hidden`."""
    texts, names = _library(row)
    last = {name: number for number, (text, name) in enumerate(zip(texts, names, strict=True)) if text in retrieved}
    before = [
        text
        for number, (text, name) in enumerate(zip(texts, names, strict=True))
        if number < last.get(name, 0) and text not in retrieved
    ]
    return tuple(
        answer
        for answer in row.answers
        if any(_states(text, answer) for text in before)
        and not any(_states(text, answer) for text in (*retrieved, row.question))
    )


def _states(text: str, answer: str) -> bool:
    return f" {normalise(answer)} " in f" {normalise(text)} "


def _library(row: Row) -> tuple[list[str], list[str]]:
    """Return all chunks of the row's documents, each document's in reading order, with their documents' names."""
    if not row.library:
        return list(row.passages), [f"{row.key} {name}" for name in row.documents or ("",) * len(row.passages)]
    texts = [text for chunks in row.library.values() for text in chunks]
    return texts, [name for name, chunks in row.library.items() for _ in chunks]


# ------------------------------------------------------------------------------------------------------ the rows


Record = dict[str, Any]
"""Result of one cell for one row."""


class Journal:
    """Records, stored row by row if there is a folder, so that an interrupted run can resume.

    The file's first line contains the settings. Nothing is created before the first record.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        """Read existing records.

        Raises:
            SettingError: The folder holds results of other settings.
        """
        self._path = folder and folder / "rows.jsonl"
        self._settings = json.loads(json.dumps(settings))
        self._file: BufferedRandom | None = None
        self._records: dict[tuple[str, str], Record] = {}
        if self._path and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        lines = _whole(path.read_bytes()).splitlines()
        try:
            header, *records = [json.loads(line) for line in lines] or [{"settings": self._settings}]
            theirs = header["settings"]
            self._records = {(record["cell"], record["row"]): record for record in records}
        except (ValueError, KeyError, TypeError):
            raise KvragError(f"{path} is damaged or not of this command: delete it, or choose another folder") from None
        different = [name for name in self._settings if self._settings[name] != theirs.get(name)]
        if different:
            raise SettingError(
                f"{path} holds results of other settings (different: {', '.join(different)}): "
                "choose another --out, or delete it"
            )

    def find(self, cell: Cell, row: Row) -> Record | None:
        """Return the record of a cell and a row, if there is one."""
        return self._records.get((cell.key, row.key))

    def add(self, records: Sequence[Record]) -> None:
        """Store the records of one row."""
        if self._path:
            file = self._file or self._open(self._path)
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            file.flush()
        self._records.update(((record["cell"], record["row"]), record) for record in records)

    def _open(self, path: Path) -> BufferedRandom:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = file = path.open("r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KvragError(f"another process is writing to {path}: choose another --out") from None
        sound = len(_whole(file.read()))
        file.truncate(sound)  # a killed process may have left a partial line
        file.seek(sound)
        if not sound:
            file.write((json.dumps({"settings": self._settings}) + "\n").encode())
        return file

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _whole(content: bytes) -> bytes:
    """Return the content up to the last complete line."""
    return content[: content.rfind(b"\n") + 1]


# ------------------------------------------------------------------------------------------------- the measurement


@dataclass
class Models:
    """One model, with and without its preamble."""

    model: Model
    _bare: Model | None = field(default=None, init=False)

    def get(self, preamble: bool) -> Model:
        """Return the model; both variants share the weights."""
        if preamble:
            return self.model
        if self._bare is None:
            self._bare = Model(self.model.hf, self.model.tokenizer.hf, self.model.name, True, preamble=False)
        return self._bare


Progress = Callable[[int, int], None]


def measure(
    model: Model,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    asking: Asking,
    journal: Journal,
    ram_bytes: int = 2 << 30,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill the journal with a record per cell and task, skipping existing ones.

    Raises:
        ModelError: Logits or KV are NaN or infinite.
    """
    models = Models(model)
    setups = {cell.setup for cell in cells if cell.label != FULL}
    before, total = 0, len(tasks)
    progress(before, total)
    for portion in _portions(tasks, model.bytes_per_token * len(setups)):

        def moved(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        if len(finished(portion, cells, journal)) < len(portion):
            with open_engines(models, cells, ram_bytes) as engines:
                answer(engines, portion, cells, asking, journal, moved)
        before += len(portion)
        progress(before, total)


def encode(engines: dict[Setup, BlendEngine], documents: Mapping[str, Sequence[str]], progress: Progress) -> None:
    """Encode the chunks of documents, by name, with every engine."""
    done, total = 0, len(engines) * sum(map(len, documents.values()))
    for engine in engines.values():
        for name, chunks in documents.items():
            progress(done, total)
            engine.warm(chunks, document=name)
            done += len(chunks)
    progress(done, total)


def answer(
    engines: dict[Setup, BlendEngine],
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    asking: Asking,
    journal: Journal,
    progress: Progress,
) -> None:
    """Like `measure`, with engines that are open."""
    sampling = Sampling(max_new_tokens=asking.max_tokens, temperature=0, stop=asking.stop)
    done = finished(tasks, cells, journal)
    pending, num_done = {task.row.key for task in tasks} - {task.row.key for task in done}, len(done)
    progress(num_done, len(tasks))
    for number, task in enumerate(tasks):
        # also for finished tasks: which chunks are stored, and by which engine, must not depend on the progress
        _warm(engines, task)
        if task.row.key in pending:
            journal.add(list(_measure_row(engines, task, cells, sampling, number)))
            progress(num_done := num_done + 1, len(tasks))


def finished(tasks: Sequence[Task], cells: Sequence[Cell], journal: Journal) -> list[Task]:
    """Return the tasks with a record of every cell."""
    return [task for task in tasks if all(journal.find(cell, task.row) for cell in cells)]


def _portions(tasks: Sequence[Task], bytes_per_token: int) -> Iterator[list[Task]]:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    most = max(_PORTION_BYTES, min(_LIBRARY_BYTES, free // 4)) if tasks[0].row.library else _PORTION_BYTES
    portion: list[Task] = []
    size = 0.0
    warmed: set[str] = set()
    for task in tasks:
        new = {name: chunks for name, chunks in task.row.library.items() if name not in warmed}
        letters = sum(len(chunk) for chunks in new.values() for chunk in chunks)
        share = letters / sum(map(len, task.row.passages)) if task.row.library else 1
        needed = task.tokens * share * bytes_per_token
        if portion and size + needed > most:
            yield portion
            portion, size, warmed = [], 0.0, set()
        portion.append(task)
        size += needed
        warmed.update(new)
    yield portion


@contextmanager
def open_engines(models: Models, cells: Sequence[Cell], ram_bytes: int) -> Iterator[dict[Setup, BlendEngine]]:
    """Open an engine per setup, each on an empty store."""
    setups = list(dict.fromkeys(cell.setup for cell in cells if cell.label != FULL))
    with ExitStack() as stack:
        yield {setup: _engine(stack, models, setup, cells, ram_bytes // len(setups)) for setup in setups}


def _engine(stack: ExitStack, models: Models, setup: Setup, cells: Sequence[Cell], ram_bytes: int) -> BlendEngine:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-quality-", ignore_cleanup_errors=True))
    min_run = min(cell.config.min_run for cell in cells)  # minimum length of a stored chunk
    config = BlendConfig(min_run=min_run, context_tokens=setup.context_tokens, context=setup.context)
    return stack.enter_context(BlendEngine(models.get(setup.preamble), folder, config, ram_bytes, setup.codec))


def _warm(engines: dict[Setup, BlendEngine], task: Task) -> None:
    if not task.chunks:
        return  # encoded before, with their documents
    for setup, engine in engines.items():
        try:
            if setup.context_tokens:
                texts, documents = _library(task.row)
                engine.warm(texts, document=documents)
            else:  # neighbours make no difference
                engine.warm(task.chunks[setup.chunk_tokens])
        except ModelError as error:
            raise ModelError(f"row {task.row.id}: {error}") from error


def _measure_row(
    engines: dict[Setup, BlendEngine], task: Task, cells: Sequence[Cell], sampling: Sampling, number: int
) -> Iterator[Record]:
    for length, group in itertools.groupby(_by_length(cells), lambda cell: cell.setup.chunk_tokens):
        full, *others = group
        suiting = {setup: engine for setup, engine in engines.items() if setup.chunk_tokens == length}
        prompt = task.prompts[length]
        reference: Tensor | None = None
        # every cell is first, second, ... equally often, and all find the same KV in the RAM tier
        turn = number % len(others)
        for engine in suiting.values():
            engine.prefill(_ids(engine.model, prompt), BlendConfig(policy=NONE, controller="off"))
        for cell in [full, *others[turn:], *others[:turn]]:
            engine = suiting[cell.setup] if cell is not full else next(iter(suiting.values()))
            try:
                record, logits = _answer(engine, cell, prompt, sampling)
            except ModelError as error:
                raise ModelError(f"row {task.row.id}, {cell.label}: {error}") from error
            reference = logits if reference is None else reference
            record |= {
                "cell": cell.key,
                "row": task.row.key,
                "kl": divergence(reference, logits),
                "agree": float(reference.argmax() == logits.argmax()),
            }
            yield record


def _by_length(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.setup.chunk_tokens, cell.label != FULL))


def _answer(
    engine: BlendEngine, cell: Cell, prompt: str | Messages | list[int], sampling: Sampling
) -> tuple[Record, Tensor]:
    started = time.perf_counter()
    ids = _ids(engine.model, prompt)
    done = engine.prefill(ids, cell.config)
    deltas = decode(engine.model, done.ids, done.cache, done.logits, sampling)
    first = next(deltas)
    ttft_s = time.perf_counter() - started
    report = replace(done.report, ttft_s=ttft_s)
    record = {
        "answer": first.text + "".join(delta.text for delta in deltas),
        "prompt_tokens": report.prompt_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "ttft_s": ttft_s,
    }
    return record, done.logits.cpu()


# ----------------------------------------------------------------------------------------------------- the results


def summarise(
    tasks: Sequence[Task], cells: Sequence[Cell], journal: Journal, seed: int, against: str = "hkvd"
) -> list[dict[str, Any]]:
    """Return metrics per cell with 95 % intervals, compared with full prefill and with `against` at the same ratio."""
    full_cells = {cell.setup.chunk_tokens: cell for cell in cells if cell.label == FULL}
    tables = {cell: _table(tasks, cell, full_cells[cell.setup.chunk_tokens], journal) for cell in cells}
    groups = _groups(tasks)
    right = next(table["em"] for cell, table in tables.items() if cell.label == FULL) == 1
    if tasks[0].row.beginning and right.any():
        groups[RIGHT] = right
    numbers = contexts(tasks)
    bootstraps = {name: Bootstrap(numbers[mask], seed) for name, mask in groups.items()}
    results = []
    for cell, table in tables.items():
        full = tables[full_cells[cell.setup.chunk_tokens]]
        rival = next(
            (
                table
                for other, table in tables.items()
                if (other.label, other.ratio, other.setup) == (against, cell.ratio, cell.setup) and other is not cell
            ),
            None,
        )
        parts = {
            name: _compare(bootstraps[name], _part(table, mask), _part(full, mask), rival and _part(rival, mask))
            for name, mask in groups.items()
        }
        results.append(
            {
                "policy": cell.label,
                "ratio": cell.ratio,
                **asdict(cell.setup),
                **parts.pop("all"),
                "groups": {name: _brief(part) for name, part in parts.items()},
            }
        )
    return results


def _table(tasks: Sequence[Task], cell: Cell, full: Cell, journal: Journal) -> dict[str, Values]:
    columns: dict[str, list[float]] = {}
    for task in tasks:
        record, reference = journal.find(cell, task.row), journal.find(full, task.row)
        assert record is not None, "measured before"
        assert reference is not None, "measured before"
        given, wanted = record["answer"], reference["answer"]
        # the documents' own continuation is known to the first word
        scored = first_word(given) if task.row.beginning else given
        measured = {name: score(scored, task.row.answers) for name, score in _METRICS.items()}
        if task.row.beginning:
            measured["em"] = float(scored in task.row.answers)  # normalised, "the" would be no answer at all
        measured |= {"same": exact_match(given, [wanted]), "word": float(first_word(given) == first_word(wanted))}
        measured |= {"kl": record["kl"], "agree": record["agree"], "ttft_s": record["ttft_s"]}
        measured["leaked"] = exact_match(record["answer"], task.hidden)
        measured["reused"] = record["reused_tokens"] / record["prompt_tokens"]
        measured["recomputed"] = record["recomputed_tokens"] / max(1, record["reused_tokens"])
        for name, value in measured.items():
            columns.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in columns.items()}


def _part(table: dict[str, Values], mask: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, Values]:
    return {name: values[mask] for name, values in table.items()}


def contexts(tasks: Sequence[Task]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of each task's context, counted from 0."""
    numbers: dict[str | tuple[str, ...], int] = {}
    names = (task.row.context or tuple(sorted(task.row.passages)) for task in tasks)
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def _groups(tasks: Sequence[Task]) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return task masks by name: all, kinds of question, what questions depend on, and what was retrieved."""
    groups = {"all": np.ones(len(tasks), bool)}
    for kind in dict.fromkeys(task.row.kind for task in tasks if task.row.kind):
        groups[f"kind: {kind}"] = np.array([task.row.kind == kind for task in tasks])
    masks = {
        ACROSS: [task.row.across is True for task in tasks],
        WITHIN: [task.row.across is False for task in tasks],
        RETRIEVED: [task.row.supported is True for task in tasks],
        NOT_RETRIEVED: [task.row.supported is False for task in tasks],
        HIDDEN: [bool(task.hidden) for task in tasks],
    }
    return groups | {name: np.array(mask) for name, mask in masks.items() if any(mask)}


def _compare(
    bootstrap: Bootstrap, ours: dict[str, Values], full: dict[str, Values], rival: dict[str, Values] | None
) -> dict[str, Any]:
    result: dict[str, Any] = {"samples": len(ours["em"])}
    for name in (*_METRICS, *_AGAINST_FULL, "leaked"):
        result[name] = asdict(bootstrap.mean(ours[name]))
    for name in ("em", "agree", "same", "word", "leaked"):
        if ours[name].min() == ours[name].max():  # no resample of equal values differs
            hits = int(ours[name][0] * bootstrap.num_contexts)
            result[name] |= dict(zip(("low", "high"), wilson(hits, bootstrap.num_contexts), strict=True))
    for name in ("reused", "recomputed"):
        result[name] = float(ours[name].mean())
    for name in _METRICS:
        result[f"{name}_minus_full"] = asdict(bootstrap.mean(ours[name] - full[name]))
    result["em_kept"] = asdict(_kept(bootstrap, ours["em"], full["em"]))
    result["f1_kept"] = asdict(_kept(bootstrap, ours["f1"], full["f1"]))
    result["ttft_s"] = float(np.median(ours["ttft_s"]))
    result["speedup"] = asdict(bootstrap.median_ratio(full["ttft_s"], ours["ttft_s"]))
    if rival is not None:
        result["against"] = {
            name: asdict(bootstrap.mean(ours[name] - rival[name])) for name in (*_METRICS, "agree", "kl")
        }
    return result


def _kept(bootstrap: Bootstrap, ours: Values, full: Values) -> Interval:
    return bootstrap.of(lambda a, b: a / b, ours, full) if full.any() else Interval(None)


def _brief(part: dict[str, Any]) -> dict[str, Any]:
    names = ("samples", *_METRICS, *_AGAINST_FULL, "leaked", "em_kept", "em_minus_full", "against")
    return {name: part[name] for name in names if name in part}


# --------------------------------------------------------------------------------------------- run identity


def identity(
    model: Model, cells: Sequence[Cell], asking: Asking, data: dict[str, Any], ram_bytes: int
) -> dict[str, Any]:
    """Return everything that affects a record. Records with different identities must not be mixed."""
    parts = model.fingerprint.parts()
    return {
        "model": model.name,
        **{name: json.loads(parts[name]) for name in ("weights", "tokenizer", "dtype", "rope")},
        "device": str(model.device),
        "data": data,
        **asdict(asking),
        "ram_bytes": ram_bytes,
        "grid": {cell.key: asdict(cell.config) for cell in cells},
        "code": _code(),
    }


def _code() -> str:
    """Return a hash of the source of every step: other code may answer differently."""
    package = files("kvrag")
    digest = blake2b(digest_size=8)
    for name in _CODE:
        place = Path(str(package / name))
        for source in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def environment(model: Model) -> dict[str, Any]:
    """Return versions, threads and machine."""
    return {**run_settings(model), "kvrag": version("kvrag"), "numpy": np.__version__}
