"""More results than `python -m benchmarks answers` has: ROUGE-L, by what was retrieved, policies against one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import grid
from benchmarks.quality.answers import cell_lines, heading, ratio
from benchmarks.quality.compare import Record, first_word
from benchmarks.quality.grid import Cell, Journal, Table, Task, exact_match, normalise
from benchmarks.quality.metrics import Bootstrap, rouge_l, token_f1
from benchmarks.quality.rows import QuestionRow
from benchmarks.quality.worlds import WorldRow

ACROSS, WITHIN = "depends on another passage", "depends on one passage"
HIDDEN = "answer only in a neighbour"
"""Questions with `hidden` answers; their metric `leaked` is the share of answers from what was not retrieved."""
_PAIRED = ("em", "f1", "rouge_l", "kept", "kl")

# -------------------------------------------------------------------- metrics


def hidden(row: QuestionRow) -> tuple[str, ...]:
    """Return the answers that the model can get from the KV only.

    The prompt does not contain them, and a chunk before one of its chunks in the same document does.
    """
    before = []
    for chunks in row.all_documents().values():
        retrieved = [number for number, chunk in enumerate(chunks) if chunk in row.passages]
        before += [chunk for chunk in chunks[: max(retrieved, default=0)] if chunk not in row.passages]
    return tuple(
        answer
        for answer in row.answers
        if any(_states(text, answer) for text in before)
        and not any(_states(text, answer) for text in (*row.passages, row.question))
    )


def _states(text: str, answer: str) -> bool:
    return f" {normalise(answer)} " in f" {normalise(text)} "


def tables(tasks: Sequence[Task], cells: Sequence[Cell], journal: Journal[Record]) -> list[Table]:
    """Return `grid.tables` with three more metrics: token F1, ROUGE-L and leaked answers."""
    measured = grid.tables(tasks, cells, journal)
    for at, metrics in enumerate(measured):
        answers = [(journal.rows[task.row.key][at].text, task.row) for task in tasks]
        scored = [first_word(text) if row.beginning else text for text, row in answers]
        metrics["f1"] = np.array([token_f1(text, row.answers) for text, (_, row) in zip(scored, answers, strict=True)])
        metrics["rouge_l"] = np.array([rouge_l(text, row.answers) for text, row in answers])
        metrics["leaked"] = np.array([exact_match(text, hidden(row)) for text, row in answers])
    return measured


def groups(tasks: Sequence[Task]) -> dict[str, NDArray[np.bool_]]:
    """Return masks by the kind of question, what it depends on, and what was retrieved."""
    kinds = dict.fromkeys(task.row.kind for task in tasks if task.row.kind)
    masks = {f"kind: {kind}": [task.row.kind == kind for task in tasks] for kind in kinds}
    rows = [task.row if isinstance(task.row, WorldRow) else None for task in tasks]
    masks |= {
        ACROSS: [row is not None and row.across is True for row in rows],
        WITHIN: [row is not None and row.across is False for row in rows],
        HIDDEN: [bool(hidden(task.row)) for task in tasks],
    }
    return {name: np.array(mask) for name, mask in masks.items() if any(mask)}


def summarise(
    tasks: Sequence[Task], cells: Sequence[Cell], measured: Sequence[Table], seed: int, against: str
) -> list[dict[str, Any]]:
    """Return `grid.summarise` with groups, and differences to the policy `against` at the same ratio, paired."""
    contexts = grid.contexts(tasks)
    bootstrap = Bootstrap(contexts, seed)
    results = grid.summarise(cells, measured, contexts)
    masks = groups(tasks)
    draws = {name: Bootstrap(contexts[mask], seed) for name, mask in masks.items()}
    rivals = {cell.ratio: metrics for cell, metrics in zip(cells, measured, strict=True) if cell.label == against}
    for result, cell, metrics in zip(results, cells, measured, strict=True):
        result |= _intervals(bootstrap, metrics, measured[0])
        result["groups"] = {}
        for name, mask in masks.items():
            part, full = _part(metrics, mask), _part(measured[0], mask)
            summary = grid.summary(part, full, len(np.unique(contexts[mask])))
            result["groups"][name] = summary | _intervals(draws[name], part, full)
        rival = rivals.get(cell.ratio)
        if rival is not None and cell.label != against:
            result["against"] = {name: bootstrap.mean(metrics[name] - rival[name]) for name in _PAIRED}
    return results


def _intervals(bootstrap: Bootstrap, table: Table, full: Table) -> dict[str, Any]:
    means = {name: bootstrap.mean(table[name]) for name in (*_PAIRED, "leaked")}
    if full["em"].any():
        means["em_kept"] = bootstrap.of(lambda a, b: a / b, table["em"], full["em"])
    return means


def _part(table: Table, mask: NDArray[np.bool_]) -> Table:
    return {name: values[mask] for name, values in table.items()}


# -------------------------------------------------------------------- output


def full_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report: metrics, then differences between policies, then groups of questions."""
    lines = heading(result)
    for setup, cells in by_setup(result["cells"]).items():
        first, *rest = cell_lines([cell | {"kl": cell["kl"]["value"]} for cell in cells])
        lines += ["", f"{setup}: {first}", *rest]
        rivals = [cell for cell in cells if "against" in cell]
        if rivals:
            lines += ["", f"{setup}: minus {result['settings']['against']} at the same ratio, paired", ""]
            lines.append(f"{'':26}{'ratio':>6}  {'EM':25}{'F1':25}{'ROUGE-L':25}KL")
        for cell in rivals:
            differences = "".join(f"{interval(cell['against'][name], '+.3f'):25}" for name in ("em", "f1", "rouge_l"))
            lines.append(f"{cell['policy']:26}{ratio(cell)}  {differences}{interval(cell['against']['kl'], '+.3f')}")
        lines += _by_retrieval(setup, cells)
        lines += _by_kind(setup, cells)
    return [*lines, "", result["verdict"]] if "verdict" in result else lines


def by_setup(cells: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells of a result by how chunks are cut, encoded and stored; each starts with `full`, then `none`."""
    setups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        setups.setdefault(cell["setup"], []).append(cell)
    return setups


def _by_retrieval(setup: str, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines about answers from what was not retrieved; none without such questions."""
    if HIDDEN not in cells[0]["groups"]:
        return []
    head = f"answers from what was not retrieved ({cells[0]['groups'][HIDDEN]['samples']})"
    lines = ["", f"{setup}: by what was retrieved", "", f"{'':34}{head}", f"{'':26}{'ratio':>6}"]
    return lines + [f"{cell['policy']:26}{ratio(cell)}  {interval(cell['groups'][HIDDEN]['leaked'])}" for cell in cells]


def _by_kind(setup: str, cells: Sequence[dict[str, Any]]) -> list[str]:
    names = [name for name in cells[0]["groups"] if name != HIDDEN]
    if not names:
        return []
    heads = [name.removeprefix("kind: ").replace("depends on ", "") for name in names]
    widths = [max(len(head), 5) + 2 for head in heads]
    counts = [cells[0]["groups"][name]["samples"] for name in names]
    lines = ["", f"{setup}: EM by kind of question", ""]
    lines.append(" " * 32 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    lines.append(f"{'questions':32}" + "".join(f"{n:>{width}}" for n, width in zip(counts, widths, strict=True)))
    for cell in cells:
        values = [cell["groups"][name]["em"]["value"] for name in names]
        columns = "".join(f"{value:>{width}.3f}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{cell['policy']:26}{ratio(cell)}{columns}")
    return lines


def interval(bounds: dict[str, float | None] | None, form: str = ".3f") -> str:
    """Return a value with its interval; "-" if it is undefined."""
    if bounds is None or bounds["value"] is None:
        return "-"
    return f"{bounds['value']:{form}} [{bounds['low']:{form}}, {bounds['high']:{form}}]"
