"""Answer quality of policies and ratios compared with full prefill.

Every prompt is prefilled in full once and then once per cell of the grid, in an order that changes from row to row.
Answers are greedy. Times run from messages to the first token; the KV comes from the RAM tier unless it is off.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.bench.datasets import QuestionRow
from kvrag.bench.grid import NONE, RIGHT, Cell, Setup
from kvrag.bench.metrics import Bootstrap, Interval, Values, divergence, exact_match, token_f1
from kvrag.bench.ttft import run_settings
from kvrag.config import BlendConfig, Sampling
from kvrag.control.calibrate import wilson
from kvrag.control.prompts import first_word, render
from kvrag.engine import BlendEngine
from kvrag.errors import ContextWindowError, KvragError, ModelError, PromptError, SettingError
from kvrag.generate.decode import decode
from kvrag.types import Messages

_CODE = ("backend", "reuse", "ingest", "store", "generate", "request.py", "answer.py", "config.py")
_SHARES = ("em", "same", "word", "agree")
_MEANS = ("reused", "recomputed")

Table = dict[str, Values]
"""Metrics of one cell by name, a value per row."""
Mask = NDArray[np.bool_]
Progress = Callable[[int, int], None]


# --------------------------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Task:
    """A row that fits into the window, its prompt as text, messages or token ids, and the prompt's length."""

    row: QuestionRow
    prompt: str | Messages | list[int]
    tokens: int


def make_tasks(
    model: Model, rows: Sequence[QuestionRow], max_tokens: int, instruction: str = "", skip_long: bool = False
) -> tuple[list[Task], int]:
    """Build every prompt once.

    Args:
        max_tokens: Room for the answer.
        instruction: Text between passages and question.

    Returns:
        The tasks, and the number of skipped rows.

    Raises:
        ContextWindowError: A row does not fit into the window, and `skip_long` is not set.
    """
    tasks = []
    for row in rows:
        try:
            task = _task(model, row, instruction)
        except PromptError as error:
            raise PromptError(f"row {row.id}: {error}") from error
        if task.tokens + max_tokens <= model.context_window:
            tasks.append(task)
        elif not skip_long:
            raise ContextWindowError(
                f"row {row.id} has a prompt of {task.tokens} tokens, which with {max_tokens} for the answer do not fit "
                f"into the window of {model.name} ({model.context_window}): shorten it, or skip such rows (--skip-long)"
            )
    if not tasks:
        raise ContextWindowError(
            f"none of {len(rows)} rows fits into the window of {model.name} ({model.context_window}): shorten them"
        )
    return tasks, len(rows) - len(tasks)


def _task(model: Model, row: QuestionRow, instruction: str) -> Task:
    prompt: str | Messages | list[int]
    if row.beginning:
        prompt = render(model.tokenizer, row.passages, row.beginning)
    else:
        text = "\n\n".join([*row.passages, *filter(None, [instruction]), f"Question: {row.question}"])
        prompt = model.tokenizer.as_prompt(text if model.tokenizer.has_chat_template else f"{text}\n\nAnswer:")
    return Task(row, prompt, len(_ids(model, prompt)))


def _ids(model: Model, prompt: str | Messages | list[int]) -> list[int]:
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else model.tokenizer.render(prompt)


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
        lines = _complete_lines(path.read_bytes()).splitlines()
        try:
            header, *records = [json.loads(line) for line in lines] or [{"settings": self._settings}]
            stored = header["settings"]
            self._records = {(record["cell"], record["row"]): record for record in records}
        except (ValueError, KeyError, TypeError):
            raise KvragError(f"{path} is damaged or not of this command: delete it, or choose another folder") from None
        different = [name for name in self._settings if self._settings[name] != stored.get(name)]
        if different:
            raise SettingError(
                f"{path} holds results of other settings (different: {', '.join(different)}): "
                "choose another --out, or delete it"
            )

    def find(self, cell: Cell, row: QuestionRow) -> Record | None:
        """Return the record of a cell and a row, if there is one."""
        return self._records.get((cell.key, row.key))

    def finished(self, tasks: Sequence[Task], cells: Sequence[Cell]) -> list[Task]:
        """Return the tasks with a record of every cell."""
        return [task for task in tasks if all(self.find(cell, task.row) for cell in cells)]

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
        size = len(_complete_lines(file.read()))
        file.truncate(size)  # a killed process may have left a partial line
        file.seek(size)
        if not size:
            file.write((json.dumps({"settings": self._settings}) + "\n").encode())
        return file

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _complete_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


# ------------------------------------------------------------------------------------------------- the measurement


Engines = dict[Setup, BlendEngine]


def encode(engines: Engines, documents: Mapping[str, Sequence[str]], progress: Progress) -> None:
    """Encode the chunks of documents, by name, with every engine."""
    done, total = 0, len(engines) * sum(map(len, documents.values()))
    for engine in engines.values():
        for name, chunks in documents.items():
            progress(done, total)
            engine.warm(chunks, document=name)
            done += len(chunks)
    progress(done, total)


def answer(
    engines: Engines,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    sampling: Sampling,
    journal: Journal,
    progress: Progress,
) -> None:
    """Fill the journal with a record per cell and task, skipping existing ones.

    Documents of rows are encoded before their first unfinished task and dropped after the last one.

    Raises:
        ModelError: Logits or KV are NaN or infinite.
    """
    finished = {task.row.key for task in journal.finished(tasks, cells)}
    unfinished = [(number, task) for number, task in enumerate(tasks) if task.row.key not in finished]
    last_use = {
        (setup, name): task.row.key
        for _, task in unfinished
        for setup in engines
        for name in _documents(task.row, setup)
    }
    for num_done, (number, task) in enumerate(unfinished, len(finished)):
        progress(num_done, len(tasks))
        for setup, engine in engines.items():
            for name, chunks in _documents(task.row, setup).items():
                try:
                    engine.warm(chunks, document=name)
                except ModelError as error:
                    raise ModelError(f"row {task.row.id}: {error}") from error
        journal.add(list(_measure_row(engines, task, cells, sampling, number)))
        for setup, engine in engines.items():
            for name in _documents(task.row, setup):
                if last_use[setup, name] == task.row.key:
                    engine.forget(name)
    progress(len(tasks), len(tasks))


def _documents(row: QuestionRow, setup: Setup) -> Mapping[str, Sequence[str]]:
    """Return the documents to encode for a row, by name."""
    if row.beginning:
        return {}  # encoded before, with all documents
    return row.all_documents() if setup.context_tokens else {row.key: row.passages}  # alone, neighbours have no effect


@contextmanager
def open_engines(model: Model, cells: Sequence[Cell], ram_bytes: int) -> Iterator[Engines]:
    """Open an engine per setup, each on an empty store."""
    setups = list(dict.fromkeys(cell.setup for cell in cells))
    min_run = min(cell.config.min_run for cell in cells)  # minimum length of a stored chunk
    with ExitStack() as stack:
        engines = {}
        for setup in setups:
            folder = tempfile.TemporaryDirectory(prefix="kvrag-quality-", ignore_cleanup_errors=True)
            config = BlendConfig(min_run=min_run, context_tokens=setup.context_tokens, context=setup.context)
            engine = BlendEngine(model, stack.enter_context(folder), config, ram_bytes // len(setups), setup.codec)
            engines[setup] = stack.enter_context(engine)
        yield engines


def _measure_row(
    engines: Engines, task: Task, cells: Sequence[Cell], sampling: Sampling, number: int
) -> Iterator[Record]:
    full, *others = cells
    # every cell is first, second, ... equally often, and all find the same KV in the RAM tier
    turn = number % len(others)
    for engine in engines.values():
        engine.prefill(_ids(engine.model, task.prompt), BlendConfig(policy=NONE, controller="off"))
    reference: Tensor | None = None
    for cell in [full, *others[turn:], *others[:turn]]:
        try:
            record, logits = _answer(engines[cell.setup], cell, task.prompt, sampling)
        except ModelError as error:
            raise ModelError(f"row {task.row.id}, {cell.label}: {error}") from error
        reference = logits if reference is None else reference
        yield record | {
            "cell": cell.key,
            "row": task.row.key,
            "kl": divergence(reference, logits),
            "agree": float(reference.argmax() == logits.argmax()),
        }


def _answer(
    engine: BlendEngine, cell: Cell, prompt: str | Messages | list[int], sampling: Sampling
) -> tuple[Record, Tensor]:
    started = time.perf_counter()
    prefilled = engine.prefill(_ids(engine.model, prompt), cell.config)
    deltas = decode(engine.model, prefilled.ids, prefilled.cache, prefilled.logits, sampling)
    first = next(deltas)
    ttft_s = time.perf_counter() - started
    report = prefilled.report
    record = {
        "answer": first.text + "".join(delta.text for delta in deltas),
        "prompt_tokens": report.prompt_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "ttft_s": ttft_s,
    }
    return record, prefilled.logits.cpu()


# ----------------------------------------------------------------------------------------------------- the results


def tables(tasks: Sequence[Task], cells: Sequence[Cell], journal: Journal) -> dict[Cell, Table]:
    """Return the metrics of measured tasks."""
    return {cell: _table(tasks, cell, cells[0], journal) for cell in cells}


def _table(tasks: Sequence[Task], cell: Cell, full: Cell, journal: Journal) -> Table:
    columns: dict[str, list[float]] = {}
    for task in tasks:
        record, reference = journal.find(cell, task.row), journal.find(full, task.row)
        assert record is not None, "measured before"
        assert reference is not None, "measured before"
        text, full_text = record["answer"], reference["answer"]
        # the documents' own continuation is known to the first word
        scored = first_word(text) if task.row.beginning else text
        # normalised, "the" would be no word at all
        is_right = scored in task.row.answers if task.row.beginning else exact_match(text, task.row.answers)
        values = {
            "em": is_right,
            "f1": token_f1(scored, task.row.answers),
            "same": exact_match(text, [full_text]),
            "word": first_word(text) == first_word(full_text),
            "agree": record["agree"],
            "kl": record["kl"],
            "ttft_s": record["ttft_s"],
            "reused": record["reused_tokens"] / record["prompt_tokens"],
            "recomputed": record["recomputed_tokens"] / max(1, record["reused_tokens"]),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in columns.items()}


def contexts(tasks: Sequence[Task]) -> NDArray[np.int64]:
    """Return the number of each task's context, counted from 0."""
    numbers: dict[str | tuple[str, ...], int] = {}
    names = (task.row.context or tuple(sorted(task.row.passages)) for task in tasks)
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def groups(tasks: Sequence[Task], full: Table) -> dict[str, Mask]:
    """Return masks of tasks by name: the kinds of question, and the prompts that full prefill gets right."""
    kinds = dict.fromkeys(task.row.kind for task in tasks if task.row.kind)
    masks = {f"kind: {kind}": np.array([task.row.kind == kind for task in tasks]) for kind in kinds}
    if tasks[0].row.beginning and full["em"].any():
        masks[RIGHT] = full["em"] == 1
    return masks


def summarise(
    measured: Mapping[Cell, Table], masks: Mapping[str, Mask], contexts: NDArray[np.int64], seed: int
) -> list[dict[str, Any]]:
    """Return metrics per cell with 95 % intervals, compared with full prefill: of all tasks, and of groups of them."""
    full = next(iter(measured.values()))
    bootstrap = Bootstrap(contexts, seed)
    bootstraps = {name: Bootstrap(contexts[mask], seed) for name, mask in masks.items()}
    return [
        {
            "policy": cell.label,
            "ratio": cell.ratio,
            **asdict(cell.setup),
            "setup": str(cell.setup),
            **_compare(bootstrap, table, full),
            "ttft_s": float(np.median(table["ttft_s"])),
            "speedup": asdict(bootstrap.median_ratio(full["ttft_s"], table["ttft_s"])),
            "groups": {
                name: _compare(bootstraps[name], part(table, mask), part(full, mask)) for name, mask in masks.items()
            },
        }
        for cell, table in measured.items()
    ]


def part(table: Table, mask: Mask) -> Table:
    """Return the rows of a table that a mask selects."""
    return {name: values[mask] for name, values in table.items()}


def _compare(bootstrap: Bootstrap, table: Table, full: Table) -> dict[str, Any]:
    result: dict[str, Any] = {"samples": len(table["em"])}
    for name, values in table.items():
        if name in _MEANS:
            result[name] = float(values.mean())
        elif name != "ttft_s":
            result[name] = asdict(bootstrap.mean(values))
        if name in _SHARES and values.min() == values.max():  # no resample of equal values differs
            hits = int(values[0] * bootstrap.num_contexts)
            result[name] |= dict(zip(("low", "high"), wilson(hits, bootstrap.num_contexts), strict=True))
    for name in ("em", "f1"):
        result[f"{name}_minus_full"] = asdict(bootstrap.mean(table[name] - full[name]))
        kept = bootstrap.of(lambda a, b: a / b, table[name], full[name]) if full[name].any() else Interval(None)
        result[f"{name}_kept"] = asdict(kept)
    return result


# --------------------------------------------------------------------------------------------- run identity


def identity(
    model: Model, cells: Sequence[Cell], sampling: Sampling, instruction: str, data: dict[str, Any], ram_bytes: int
) -> dict[str, Any]:
    """Return everything that affects a record. Records with different identities must not be mixed."""
    parts = model.fingerprint.parts()
    return {
        "model": model.name,
        **{name: json.loads(parts[name]) for name in ("weights", "tokenizer", "dtype", "rope")},
        "device": str(model.device),
        "data": data,
        "max_tokens": sampling.max_new_tokens,
        "stop": sampling.stop,
        "instruction": instruction,
        "ram_bytes": ram_bytes,
        "grid": {cell.key: asdict(cell.config) for cell in cells},
        "code": _code(),
    }


def _code() -> str:
    """Return a hash of the source of every step: other code may answer differently."""
    digest = blake2b(digest_size=8)
    for name in _CODE:
        path = Path(str(files("kvrag") / name))
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def environment(model: Model) -> dict[str, Any]:
    """Return versions, threads and machine."""
    return {**run_settings(model), "kvrag": version("kvrag"), "numpy": np.__version__}
