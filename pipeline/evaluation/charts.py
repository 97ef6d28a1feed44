"""Charts of a study as SVG for its page: marks say what they are when one points at them, colours follow the page."""

import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.cell import meta_of
from pipeline.evaluation.findings import Findings, Outcome, last_row
from pipeline.evaluation.metrics import BY_LENGTH
from pipeline.evaluation.study import Study

AXES = {"tokens": "raw tokens", "flops": "FLOPs", "seconds": "seconds"}
# Those of Okabe and Ito (2008) that show on white and on black; the colour-blind can tell them apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c8c8c")
STYLES = (("", "-", "o"), ("////", "--", "s"), ("....", ":", "^"))  # of bars, lines and points
LEAST_WIDTH = 8.0  # inches; narrower ones would be blown up
INK = "#000000"  # becomes the page's own colour of text


class Chart:
    """A figure of one or more panels beside each other."""

    def __init__(self, study: Study, name: str, titles: Sequence[str], width: float, height: float = 3.0) -> None:
        from matplotlib.figure import Figure

        self.study, self.name, self.words = study, name, list[str]()
        self.figure = Figure(figsize=(max(width, LEAST_WIDTH), height), layout="constrained")
        self.panels: list[Any] = self.figure.subplots(1, len(titles), squeeze=False)[0].tolist()
        for axes, title in zip(self.panels, titles, strict=True):
            axes.set_title(title, fontsize=10, parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=9)

    def tell(self, artist: Any, words: str) -> None:
        """Let a mark say something when one points at it."""
        artist.set_gid(f"mark-{len(self.words)}")
        self.words.append(words)

    def legend(self, names: set[str], lines: bool = False) -> None:
        """Say below the panels which colour is which model."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        shown = {name: self.style(name) for name in self.study.candidates if name in names}
        marks: list[Any] = [Patch(facecolor=colour, hatch=hatch, edgecolor="w") for colour, hatch, *_ in shown.values()]
        if lines:
            marks = [Line2D([], [], color=colour, linestyle=dash) for colour, _, dash, _ in shown.values()]
        room = int(self.figure.get_figwidth() / (0.6 + 0.08 * max(map(len, shown), default=1)))  # inches of an entry
        columns = math.ceil(len(shown) / math.ceil(len(shown) / max(1, min(room, 5))))
        self.figure.set_figheight(self.figure.get_figheight() + 0.2 * len(shown) / columns)
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
        self.figure.legend(marks, list(shown), **place)

    def svg(self, label: str) -> str:
        """The figure as a part of a page that has other figures."""
        from matplotlib import rc_context

        drawn = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        opening = f'<svg role="img" aria-label="{html.escape(label)}" xmlns:xlink="http://www.w3.org/1999/xlink" '
        text = re.sub(r'.*?<svg .*?(viewBox=".*?").*?>', rf"{opening}\1>", drawn.getvalue(), count=1, flags=re.S)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text).replace(INK, "currentColor")
        for number, words in enumerate(self.words):
            mark = f'<g id="{self.name}-mark-{number}">'
            text = text.replace(mark, f"{mark}<title>{html.escape(words)}</title>", 1)
        return text

    def style(self, name: str) -> tuple[str, str, Any, str]:
        """The colour, hatch, dash and marker of a model, the same in every chart."""
        turn, place = divmod(list(self.study.candidates).index(name), len(COLOURS))
        return COLOURS[place], *STYLES[turn % len(STYLES)]


# --- What is drawn -----------------------------------------------------------------------------------------------


def score_bars(findings: Findings) -> str:
    """The mean of every model on every task with the 95 % interval over seeds; every dot is a seed."""
    tasks = findings.tasks
    chart = Chart(findings.study, "bars", [*tasks], sum(1.6 + 0.42 * len(outcomes) for outcomes in tasks.values()))
    for axes, (task, outcomes) in zip(chart.panels, tasks.items(), strict=True):
        for place, one in enumerate(outcomes):
            colour, hatch, *_ = chart.style(one.name)
            bar = axes.bar(place, one.mean, width=0.75, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            reach = "" if one.reach is None else f" ± {one.reach:.2f} (95 %, {len(one.values)} seeds)"
            chart.tell(bar[0], f"{one.name}, {task}: {one.mean:.2f}{reach}")
            if one.reach is not None:
                axes.errorbar(place, one.mean, one.reach, color=INK, capsize=3, linewidth=1)
            axes.plot([place] * len(one.values), one.values, "o", color=INK, markersize=2.5)
        axes.set_xticks([])
        axes.set_ylabel(outcomes[0].measure)
        limit_scores(axes, outcomes[0], from_zero=True)
    chart.legend({one.name for one in findings.outcomes})
    return chart.svg("Scores of all models on all tasks as bars; the table below has the numbers")


def learning_curves(findings: Findings, axis: str) -> str:
    """Validation in the course of pretraining and of every task, with the band over seeds."""
    study = findings.study
    panels = [("pretraining", "val/loss", 1.0, list(study.pretraining()))] if study.config.pretrain else []
    for task, outcomes in findings.tasks.items():
        cells = [cell for one in outcomes for cell in one.cells]
        panels.append((task, f"val/{outcomes[0].metric}", outcomes[0].scale, cells))
    chart = Chart(study, f"curves-{axis}", [title for title, *_ in panels], 3.4 * len(panels))
    for axes, (_, metric, scale, cells) in zip(chart.panels, panels, strict=True):
        for name in dict.fromkeys(cell.candidate.name for cell in cells):
            runs = [cell.run.rows() for cell in cells if cell.candidate.name == name]
            points = [[(row[axis], scale * row[metric]) for row in rows if metric in row] for rows in runs]
            draw_band(chart, axes, name, points, AXES[axis])
        mark_amounts(axes, AXES[axis])
        axes.set_ylabel(f"{metric} (points)" if scale == 100 else metric, fontsize=9)
    chart.legend({cell.candidate.name for *_, cells in panels for cell in cells}, lines=True)
    return chart.svg(f"Learning curves over {AXES[axis]}")


def limit_scores(axes: Any, outcome: Outcome, from_zero: bool = False) -> None:
    """Leave out what no score can be, whatever the intervals say."""
    bottom, top = axes.get_ylim()
    bottom, top = (0 if from_zero else bottom), max(top, 1e-3)
    axes.set_ylim(max(bottom, -4) if outcome.scale == 100 else bottom, min(top, 104) if outcome.scale == 100 else top)


def mark_amounts(axes: Any, name: str) -> None:
    """Few marks and short numbers below a panel: 2k, 1.5G."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(name, fontsize=9)


def length_curves(findings: Findings) -> str:
    """How often strings of each length come out right, for the tasks that tell; nothing where none does."""
    told = {task: outcomes for task, outcomes in findings.tasks.items() if any(map(by_length, outcomes))}
    if not told:
        return ""
    chart = Chart(findings.study, "lengths", [*told], 4.6 * len(told), height=3.8)
    for axes, outcomes in zip(chart.panels, told.values(), strict=True):
        for one in outcomes:
            draw_band(chart, axes, one.name, by_length(one), "letters")
        axes.set_xlabel("letters", fontsize=9)
        axes.set_ylabel("exact match (points)", fontsize=9)
        axes.set_ylim(-3, 103)
    chart.legend({one.name for outcomes in told.values() for one in outcomes}, lines=True)
    return chart.svg("Exact match by the length of the string")


def by_length(outcome: Outcome) -> list[list[tuple[float, float]]]:
    """The scores of every length, seed by seed."""
    start = f"{outcome.split}/{BY_LENGTH}"
    found = [meta["metrics"].items() for cell in outcome.cells if (meta := meta_of(cell))]
    runs = [[(int(key[len(start) :]), 100 * value) for key, value in one if key.startswith(start)] for one in found]
    return [sorted(run) for run in runs if run]


def draw_band(chart: Chart, axes: Any, name: str, runs: list[list[tuple[float, float]]], unit: str) -> None:
    """The mean over seeds with what lies between the lowest and the highest; every point says its numbers."""
    runs = [run for run in runs if run]  # a seed may not have begun
    if not runs:
        return
    length = min(map(len, runs))
    x, values = np.moveaxis(np.array([run[:length] for run in runs], np.float64), 2, 0)
    x, mean = x.mean(0), values.mean(0)
    colour, _, dash, _ = chart.style(name)
    axes.plot(x, mean, color=colour, linestyle=dash, linewidth=1.6)
    if len(runs) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    for place, value, low, high in zip(x, mean, values.min(0), values.max(0), strict=True):
        (point,) = axes.plot(place, value, "o", color=colour, markersize=3.5)
        chart.tell(point, f"{name}: {value:.4g} ({low:.4g} to {high:.4g}) at {place:,.4g} {unit}")


COSTS = {"flops": "FLOPs of training", "seconds": "seconds of training", "parameters": "block parameters"}


def cost_scatter(findings: Findings, cost: str) -> str:
    """What the training of a model cost, pretraining included, against what it reached."""
    tasks = findings.tasks
    chart = Chart(findings.study, f"cost-{cost}", [*tasks], 3.4 * len(tasks))
    for axes, outcomes in zip(chart.panels, tasks.values(), strict=True):
        for one in outcomes:
            spent = cost_of_outcome(one, cost)
            colour, *_, marker = chart.style(one.name)
            (point,) = axes.plot(spent, one.mean, marker, color=colour, markersize=8)
            chart.tell(point, f"{one.name}: {one.mean:.2f} for {spent:.3g} {COSTS[cost]}")
            if one.reach is not None:
                axes.errorbar(spent, one.mean, one.reach, color=colour, capsize=3, linewidth=1)
        axes.margins(x=0.15)
        limit_scores(axes, outcomes[0])
        mark_amounts(axes, COSTS[cost])
        axes.set_ylabel(outcomes[0].measure, fontsize=9)
    chart.legend({one.name for one in findings.outcomes})
    return chart.svg(f"Scores against {COSTS[cost]}")


def cost_of_outcome(outcome: Outcome, cost: str) -> float:
    """The mean over seeds of what a fine-tuning and the pretraining before it cost."""
    if cost == "parameters":
        return outcome.candidate.cost.parameters
    jobs = [[cell, cell.parent] if cell.parent else [cell] for cell in outcome.cells]
    return float(np.mean([sum(last_row(job).get(cost, 0) for job in both) for both in jobs]))
