"""Answers of policies and ratios compared with full prefill's; `benchmarks.quality.compare` measures.

The order of the policies changes from row to row. Times run from token ids to the first token; the KV comes from the
RAM tier unless it is off.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.compare import Record, ask, compare, first_word
from benchmarks.quality.rows import QuestionRow
from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.control.plan import wilson
from kvrag.control.prompts import render
from kvrag.engine import BlendEngine
from kvrag.errors import ContextWindowError, ModelError, PromptError
from kvrag.listen.check import is_kept

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

FULL, NONE = "full", "none"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

Values = NDArray[np.float64]
Interval = dict[str, float]
"""`value` with its 95 % interval, `low` to `high`."""
Table = dict[str, Values]
"""Metrics of one cell by name, a value per row."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a policy with its settings and a ratio."""

    label: str
    config: BlendConfig

    @property
    def ratio(self) -> float | None:
        """The ratio; None where it has no effect."""
        return None if self.config.policy in (FULL, NONE) else self.config.ratio


def make_cells(configs: Mapping[str, BlendConfig], ratios: Sequence[float]) -> list[Cell]:
    """Return full prefill, plain reuse, and each policy, by its label, at every ratio."""
    cells = [Cell(label, BlendConfig(policy=label, ratio=0.0, controller="off")) for label in (FULL, NONE)]
    for label, config in configs.items():
        if config.policy not in (FULL, NONE):
            cells += [Cell(label, replace(config, ratio=ratio, controller="off")) for ratio in dict.fromkeys(ratios)]
    return cells


# --------------------------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Task:
    """A row that fits into the window, and the token ids of its prompt."""

    row: QuestionRow
    ids: list[int]


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
            ids = _ids(model, row, instruction)
        except PromptError as error:
            raise PromptError(f"row {row.id}: {error}") from error
        if len(ids) + max_tokens <= model.context_window:
            tasks.append(Task(row, ids))
        elif not skip_long:
            raise ContextWindowError(
                f"row {row.id} has a prompt of {len(ids)} tokens, which with {max_tokens} for the answer do not fit "
                f"into the window of {model.name} ({model.context_window}): shorten it, or skip such rows (--skip-long)"
            )
    if not tasks:
        raise ContextWindowError(
            f"none of {len(rows)} rows fits into the window of {model.name} ({model.context_window}): shorten them"
        )
    return tasks, len(rows) - len(tasks)


def _ids(model: Model, row: QuestionRow, instruction: str) -> list[int]:
    if row.beginning:
        return render(model.tokenizer, row.passages, row.beginning)
    return ask(model.tokenizer, [*row.passages, *filter(None, [instruction])], row.question)


# ------------------------------------------------------------------------------------------------- the measurement


class Journal(Generic[R]):
    """The records of finished rows by their keys, a record per cell.

    They are stored if there is a file, as JSON lines with a digest of the settings, so that an interrupted run can
    resume. Lines of other settings stay and are not used.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], kind: type[R]) -> None:
        """Read the file, if there is one.

        Args:
            kind: Dataclass of the records.
        """
        self._path = path
        self._digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.rows: dict[str, list[R]] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # a killed process may have left a partial line
                stored = json.loads(line)
                if stored["settings"] == self._digest:
                    self.rows[stored["row"]] = [kind(**record) for record in stored["records"]]

    def add(self, row: str, records: list[R]) -> None:
        """Keep the records of a row."""
        self.rows[row] = records
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"settings": self._digest, "row": row, "records": [asdict(record) for record in records]})
            with self._path.open("a") as file:
                file.write(f"\n{line}")  # not onto a partial line


def answer(
    engine: BlendEngine,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    sampling: Sampling,
    journal: Journal[Record],
    progress: Callable[[int, int], None],
) -> None:
    """Fill the journal with the records of every task, skipping existing ones.

    Documents of rows are encoded before their first unfinished task and dropped after the last one.

    Raises:
        ModelError: Logits or KV are NaN or infinite.
    """
    unfinished = [(number, task) for number, task in enumerate(tasks) if task.row.key not in journal.rows]
    last_use = {name: number for number, task in unfinished for name in _documents(task.row, engine.config)}
    for num_done, (number, task) in enumerate(unfinished, len(tasks) - len(unfinished)):
        progress(num_done, len(tasks))
        documents = _documents(task.row, engine.config)
        try:
            for name, chunks in documents.items():
                engine.warm(chunks, document=name)
            journal.add(task.row.key, _measure(engine, task, cells, sampling, number))
        except ModelError as error:
            raise ModelError(f"row {task.row.id}: {error}") from error
        for name in documents:
            if last_use[name] == number:
                engine.forget(name)
    progress(len(tasks), len(tasks))


def _documents(row: QuestionRow, config: BlendConfig) -> Mapping[str, Sequence[str]]:
    """Return the documents to encode for a row, by name."""
    if row.beginning:
        return {}  # encoded before, with all documents
    return row.all_documents() if config.context_tokens else {row.key: row.passages}  # alone, neighbours have no effect


def _measure(engine: BlendEngine, task: Task, cells: Sequence[Cell], sampling: Sampling, number: int) -> list[Record]:
    # every cell is first, second, ... equally often, and all find the same KV in the RAM tier
    _, *others = range(len(cells))
    turn = number % len(others)
    order = [*others[turn:], *others[:turn]]
    engine.prefill(task.ids, cells[1].config)
    configs = [cells[at].config for at in order]
    records = compare(engine.model, engine.prefill, task.ids, configs, sampling, own_answers=not task.row.beginning)
    measured = dict(zip([0, *order], records, strict=True))
    return [measured[at] for at in range(len(cells))]


# ----------------------------------------------------------------------------------------------------- the results


def tables(tasks: Sequence[Task], cells: Sequence[Cell], journal: Journal[Record]) -> list[Table]:
    """Return the metrics of measured tasks, per cell."""
    return [_table(tasks, at, journal) for at in range(len(cells))]


def _table(tasks: Sequence[Task], at: int, journal: Journal[Record]) -> Table:
    columns: dict[str, list[float]] = {}
    for task in tasks:
        full, record = journal.rows[task.row.key][0], journal.rows[task.row.key][at]
        is_right = exact_match(record.text, task.row.answers)
        if task.row.beginning:  # known to the first word; normalised, "the" would be no word at all
            is_right = first_word(record.text) in task.row.answers
        agrees = [ours == theirs for ours, theirs in zip(record.tokens, full.tokens, strict=True)]
        values = {
            "em": is_right,
            "kept": is_kept(agrees, full.margins),
            "same": all(agrees),
            "kl": record.kl,
            "ttft_s": record.ttft_s,
            "reused": record.reused_tokens / record.prompt_tokens,
            "recomputed": record.recomputed_tokens / max(1, record.reused_tokens),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in columns.items()}


def normalise(text: str) -> str:
    """Normalise like SQuAD: lower case, no punctuation, no articles, single spaces (Rajpurkar et al., 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised text is one of the normalised answers, else 0."""
    return float(normalise(text) in {normalise(answer) for answer in answers})


def contexts(tasks: Sequence[Task]) -> NDArray[np.int64]:
    """Return the number of each task's context, counted from 0."""
    numbers: dict[str | tuple[str, ...], int] = {}
    names = (task.row.context or tuple(sorted(task.row.passages)) for task in tasks)
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def summarise(cells: Sequence[Cell], tables: Sequence[Table], contexts: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return metrics per cell."""
    full_s = np.median(tables[0]["ttft_s"])
    return [
        {
            "policy": cell.label,
            "ratio": cell.ratio,
            **summary(table, tables[0], int(contexts.max()) + 1),
            "ttft_s": float(np.median(table["ttft_s"])),
            "speedup": float(full_s / np.median(table["ttft_s"])),
        }
        for cell, table in zip(cells, tables, strict=True)
    ]


def summary(table: Table, full: Table, num_contexts: int) -> dict[str, Any]:
    """Return means, and shares with 95 % intervals, in which dependent prompts, those of one context, count as one."""
    result: dict[str, Any] = {"samples": len(table["em"])}
    result |= {name: float(table[name].mean()) for name in ("kl", "reused", "recomputed")}
    result |= {name: _share(table[name], num_contexts) for name in ("em", "kept", "same")}
    right = full["em"] == 1
    if right.any():
        result["em_kept"] = float(table["em"][right].mean())
    return result


def _share(values: Values, count: int) -> Interval:
    share = float(values.mean())
    return dict(zip(("value", "low", "high"), (share, *wilson(share * count, count)), strict=True))
