"""Plots of the results of `quality`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.quality.results import by_setup
from kvrag.errors import KvragError

Result = dict[str, Any]

_METRICS = (("em", "exact match"), ("f1", "token F1"), ("kl", "KL to full prefill, nats"))


def require() -> None:
    """Raise KvragError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise KvragError("matplotlib is not installed: pip install matplotlib")


def draw(result: Result, folder: Path) -> list[Path]:
    """Write three plots: quality over the ratio, over the time to first token, and by kind of question."""
    require()
    paths = [_over_ratio(result, folder / "ratio.png"), _over_ttft(result, folder / "ttft.png")]
    if any(cell["groups"] for cell in result["cells"]):
        paths.append(_by_kind(result, folder / "kinds.png"))
    return paths


def draw_kept(result: Result, folder: Path) -> list[Path]:
    """Write one plot: the share of full prefill's answers that is kept, over the ratio; plain reuse is ratio 0."""
    require()
    groups = by_setup(result["cells"])
    figure, axes = _axes(1, len(groups))
    for axis, (setup, cells) in zip(axes[0], groups.items(), strict=True):
        plain = cells[1]
        for policy, line in _lines(cells).items():
            ratios = [0.0, *(cell["ratio"] for cell in line)]
            parts = {"all prompts": [plain, *line]}
            kinds = [name for name in plain["groups"] if name.startswith("kind: ")]
            parts |= {name: [cell["groups"][name] for cell in (plain, *line)] for name in kinds}
            for name, points in parts.items():
                values = [point["same"] for point in points]
                is_all = name == "all prompts"
                label = f"{policy}: {name.removeprefix('kind: ')} (N={points[0]['samples']})"
                style = {"marker": "o", "ms": 4, "lw": 2} if is_all else {"ls": ":", "lw": 1}
                (drawn,) = axis.plot(ratios, [value["value"] for value in values], label=label, **style)
                if is_all:
                    low, high = ([value[end] for value in values] for end in ("low", "high"))
                    axis.fill_between(ratios, low, high, alpha=0.15, color=drawn.get_color(), linewidth=0)
        axis.set_title(f"{result['settings']['data']['file']}, {result['environment']['model']}\n{setup}", fontsize=7)
        axis.set(xlabel="ratio (0 = plain reuse)", ylabel="answers that are full prefill's")
        axis.yaxis.set_major_formatter("{x:.0%}")
        axis.set_ylim(top=1.01)
        axis.legend(fontsize=7)
    return [_save(figure, folder / "kept.png")]


def _axes(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _lines(cells: list[Result]) -> dict[str, list[Result]]:
    """Group cells by policy, with ascending ratios."""
    lines: dict[str, list[Result]] = {}
    for cell in sorted((cell for cell in cells if cell["ratio"] is not None), key=lambda cell: cell["ratio"]):
        lines.setdefault(cell["policy"], []).append(cell)
    return lines


def _over_ratio(result: Result, path: Path) -> Path:
    groups = by_setup(result["cells"])
    figure, axes = _axes(len(groups), len(_METRICS))
    for row, (setup, cells) in zip(axes, groups.items(), strict=True):
        for axis, (metric, title) in zip(row, _METRICS, strict=True):
            for policy, line in _lines(cells).items():
                shares = [cell["recomputed"] for cell in line]
                points = [cell[metric] for cell in line]
                (drawn,) = axis.plot(shares, [point["value"] for point in points], marker="o", ms=3, label=policy)
                low, high = ([point[end] for point in points] for end in ("low", "high"))
                axis.fill_between(shares, low, high, alpha=0.1, color=drawn.get_color(), linewidth=0)
            for cell, style in zip(cells[:2], ("-", ":"), strict=True):
                if metric != "kl" or cell["policy"] != "full":
                    axis.axhline(cell[metric]["value"], color="black", ls=style, lw=1, label=cell["policy"])
            if metric == "kl":
                axis.set_yscale("symlog", linthresh=1e-3)
                axis.set_ylim(bottom=0)
            axis.set(title=title, xlabel="share of the reused tokens recomputed", ylabel=str(setup) * (axis is row[0]))
        row[0].legend(fontsize=7)
    return _save(figure, path)


def _over_ttft(result: Result, path: Path) -> Path:
    groups = by_setup(result["cells"])
    figure, axes = _axes(1, len(groups))
    for axis, (setup, cells) in zip(axes[0], groups.items(), strict=True):
        for policy, line in ({cell["policy"]: [cell] for cell in cells[:2]} | _lines(cells)).items():
            values = [cell["em"] for cell in line]
            errors = [[abs(value["value"] - value[end]) for value in values] for end in ("low", "high")]
            times = [cell["ttft_s"] * 1000 for cell in line]
            plain = line[0]["ratio"] is None
            axis.errorbar(
                times,
                [value["value"] for value in values],
                yerr=errors,
                label=policy,
                marker="*" if plain else "o",
                color="black" if policy == "full" else "grey" if plain else None,
                ms=9 if plain else 3,
                elinewidth=0.5,
            )
        axis.set(title=str(setup), xlabel="time to first token, median, ms", ylabel="exact match")
        axis.legend(fontsize=7)
    return _save(figure, path)


def _by_kind(result: Result, path: Path) -> Path:
    groups = by_setup(result["cells"])
    figure, axes = _axes(len(groups), 1)
    figure.set_size_inches(13, 4 * len(groups))
    for axis, (setup, cells) in zip(axes[:, 0], groups.items(), strict=True):
        ratios = sorted({cell["ratio"] for cell in cells if cell["ratio"] is not None})
        middle = ratios[(len(ratios) - 1) // 2]
        shown = [cell for cell in cells if cell["ratio"] in (None, middle)]
        names = list(cells[0]["groups"])
        width = 0.8 / len(shown)
        for number, cell in enumerate(shown):
            values = [cell["groups"][name]["em"] for name in names]
            axis.bar(
                [at - 0.4 + (number + 0.5) * width for at in range(len(names))],
                [value["value"] for value in values],
                width,
                yerr=[[abs(value["value"] - value[end]) for value in values] for end in ("low", "high")],
                error_kw={"elinewidth": 0.5},
                label=cell["policy"],
            )
        axis.set_xticks(range(len(names)), [name.removeprefix("kind: ").replace(" on ", " on\n") for name in names])
        axis.set(title=f"{setup}; {middle:g} recomputed", ylabel="exact match")
        axis.legend(fontsize=7, ncols=2)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
