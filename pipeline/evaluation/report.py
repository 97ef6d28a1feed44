"""What a study found: one self-contained page, and the same as Markdown and CSV."""

import base64
import csv
import html
import io
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.configuration import to_yaml
from pipeline.evaluation import statistics
from pipeline.evaluation.study import Cell, Study, metric_of, result_of
from pipeline.files import write_text
from pipeline.model.config import resolve
from pipeline.terminal import print_table, say

COLOURS = {"encoder": "#2f6fb0", "decoder": "#c4632d", "encoder-decoder": "#3d8f5f"}
SHARES = ("accuracy", "macro_f1", "exact_match", "mrr@10", "ndcg@10", "recall@100")  # from 0 to 1; shown as points


@dataclass(frozen=True)
class Outcome:
    """What the seeds of one family did on one task."""

    task: str
    family: str
    metric: str
    split: str
    cells: list[Cell]
    scores: statistics.Cell

    @property
    def scale(self) -> float:
        return 100.0 if self.metric in SHARES else 1.0


@dataclass(frozen=True)
class Findings:
    """Everything a report says."""

    study: Study
    outcomes: list[Outcome]
    verdicts: list[tuple[str, str]]
    """A task and a sentence."""
    failed: list[str]


def find(study: Study, failed: list[str]) -> Findings:
    """Gather what finished jobs found, and compare all pairs of families on each task."""
    by_name: dict[tuple[str, str], list[Cell]] = {}
    for cell in study.cells():
        if study.config.learning_rates and cell.rate is None:
            continue  # not all its rates were tried
        by_name.setdefault((cell.task, cell.family), []).append(cell)
    outcomes = [outcome for (task, family), cells in by_name.items() if (outcome := gather(task, family, cells))]
    pairs = [
        (one, other)
        for task in dict.fromkeys(outcome.task for outcome in outcomes)
        for one, other in combinations([outcome for outcome in outcomes if outcome.task == task], 2)
    ]
    differences = statistics.adjust([statistics.compare(one.scores, other.scores) for one, other in pairs])
    verdicts = []
    for (one, other), difference in zip(pairs, differences, strict=True):
        unit = "points" if one.scale == 100 else one.metric
        verdicts.append((one.task, statistics.verdict(one.family, other.family, difference, unit, one.scale)))
    return Findings(study, outcomes, verdicts, failed)


def gather(task: str, family: str, cells: list[Cell]) -> Outcome | None:
    """The scores of all finished seeds; none if there are none."""
    results = [(cell, result) for cell in cells if (result := result_of(cell))]
    if not results:
        return None
    metric, split = metric_of(results[0][1]), results[0][1]["split"]
    values = [result["metrics"][f"{split}/{metric}"] for _, result in results]
    examples = [result["examples"] for _, result in results]
    whole = len({len(scores) for scores in examples}) == 1
    return Outcome(
        task, family, metric, split, [cell for cell, _ in results], statistics.Cell(values, examples if whole else ())
    )


def table_rows(findings: Findings) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    """Mean and deviation of every family on every task."""
    header = ("task", "family", "metric", "part", "seeds", "mean", "deviation")
    rows: list[tuple[object, ...]] = []
    for outcome in findings.outcomes:
        deviation = outcome.scores.deviation
        mean = outcome.scale * outcome.scores.mean
        spread = "-" if deviation is None else f"{outcome.scale * deviation:.2f}"
        part = "dev" if outcome.split == "val" else "test"
        count = len(outcome.scores.metric_S)
        rows.append((outcome.task, outcome.family, outcome.metric, part, count, f"{mean:.2f}", spread))
    return header, rows


def write_report(findings: Findings) -> Path:
    """Write report.html, report.md and scores.csv, print the table, and return the page."""
    folder = findings.study.folder
    header, rows = table_rows(findings)
    print_table("Scores", header, rows)
    for task, sentence in findings.verdicts:
        say(f"{task}: {sentence}")
    for line in findings.failed:
        say(f"failed: {line}")
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_text(folder / "scores.csv", text.getvalue())
    write_text(folder / "report.md", markdown(findings))
    write_text(folder / "report.html", page(findings))
    return folder / "report.html"


def markdown(findings: Findings) -> str:
    header, rows = table_rows(findings)
    lines = [f"# {question(findings)}", ""]
    lines += [f"- **{task}**: {sentence}" for task, sentence in findings.verdicts]
    lines += ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines += ["", "## Commands", "", "```", *commands(findings), "```"]
    return "\n".join(lines) + "\n"


def question(findings: Findings) -> str:
    config = findings.study.config
    return f"{', '.join(config.families)}: which is better at what, at equal {config.match}?"


def commands(findings: Findings) -> list[str]:
    """What to type to repeat every job."""
    cells = (*findings.study.pretraining(), *findings.study.cells())
    return [f"triptych {shlex.join(cell.command)}" for cell in cells]


# --- The page ----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; font-size: 1.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid var(--line); }
.verdict { background: var(--soft); border-left: 4px solid #2f6fb0; padding: .6rem 1rem; margin: .5rem 0; }
img { max-width: 100%; background: white; border-radius: 4px; }
pre { overflow-x: auto; background: var(--soft); padding: 1rem; }
.axes input { display: none; } .axes label { padding: .2rem .8rem; border: 1px solid var(--line); cursor: pointer; }
.axes .plot { display: none; margin-top: .7rem; }
.axes input:nth-of-type(1):checked ~ .plot:nth-of-type(1), .axes input:nth-of-type(2):checked ~ .plot:nth-of-type(2),
.axes input:nth-of-type(3):checked ~ .plot:nth-of-type(3) { display: block; }
.axes input:checked + label { background: #2f6fb0; color: white; }
@media print { .axes .plot { display: block; } .axes label { display: none; } }
"""


def page(findings: Findings) -> str:
    """The whole report as one file that needs nothing else; choosing an axis works without a script."""
    header, rows = table_rows(findings)
    study = findings.study
    parts = [
        f"<h1>{html.escape(question(findings))}</h1>",
        *(
            f'<p class="verdict"><b>{html.escape(task)}</b>: {html.escape(sentence)}</p>'
            for task, sentence in findings.verdicts
        ),
        *(f'<p class="verdict">failed: {html.escape(line)}</p>' for line in findings.failed),
        "<h2>Scores</h2>",
        picture(bars(findings)),
        html_table(header, rows),
        "<h2>What each family got</h2>",
        html_table(*plan_rows(study)),
        *curves(study),
        "<h2>What a model costs and what it reaches</h2>",
        picture(scatter(findings)),
        "<h2>Where they disagree</h2>",
        html_table(*disagreements(findings)),
        "<h2>To repeat it</h2>",
        "<pre>" + html.escape("\n".join(commands(findings))) + "</pre>",
        "<pre>" + html.escape(to_yaml(study.config)) + "</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<title>Triptych study</title></head><body>{body}</body></html>'


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def plan_rows(study: Study) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    rows: list[tuple[object, ...]] = []
    for family, cost in study.costs.items():
        model = resolve(study.models[family])
        blocks = f"{model.encoder_layers} + {model.decoder_layers}"
        numbers = (f"{cost.parameters:,}", f"{cost.all_parameters:,}", f"{cost.flops:.3g}")
        rows.append((family, model.width, blocks, model.feed_forward, *numbers))
    header = (
        "family",
        "width",
        "encoder + decoder blocks",
        "feed-forward",
        "block parameters",
        "all",
        "FLOPs a window",
    )
    return header, rows


def curves(study: Study) -> Iterable[str]:
    """Learning curves of pretraining over tokens, FLOPs and seconds, with the band over seeds."""
    if not study.config.pretrain:
        return
    yield "<h2>Learning curves</h2><p>Losses of different objectives are not comparable; their shapes are.</p>"
    yield '<div class="axes">'
    for number, axis in enumerate(("tokens", "flops", "seconds")):
        checked = " checked" if number == 0 else ""
        yield f'<input type="radio" name="axis" id="{axis}"{checked}><label for="{axis}">{axis}</label>'
    for axis in ("tokens", "flops", "seconds"):
        yield f'<div class="plot">{picture(curve(study, axis))}</div>'
    yield "</div>"


def curve(study: Study, axis: str) -> Any:
    figure, axes = new_figure(8, 3.6)
    for family in study.config.families:
        runs = [
            [row for row in cell.run.rows() if "val/loss" in row]
            for cell in study.pretraining()
            if cell.family == family
        ]
        runs = [rows for rows in runs if rows]
        if not runs:
            continue
        length = min(map(len, runs))
        x = np.mean([[row[axis] for row in rows[:length]] for rows in runs], axis=0)
        losses = np.array([[row["val/loss"] for row in rows[:length]] for rows in runs])
        axes.plot(x, losses.mean(0), color=COLOURS[family], label=family, marker=".")
        axes.fill_between(x, losses.min(0), losses.max(0), color=COLOURS[family], alpha=0.2)
    axes.set_xlabel(axis)
    axes.set_ylabel("validation loss (nats a token)")
    if axes.lines:
        axes.legend()
    return figure


def bars(findings: Findings) -> Any:
    """Scores of all families on all tasks; every dot is a seed."""
    tasks = list(dict.fromkeys(outcome.task for outcome in findings.outcomes))
    figure, axes = new_figure(max(4, 2.6 * len(tasks)), 3.6)
    families: list[str] = [*findings.study.config.families]
    for outcome in findings.outcomes:
        place = tasks.index(outcome.task) + 0.8 * ((families.index(outcome.family) + 0.5) / len(families) - 0.5)
        values = outcome.scale * outcome.scores.metric_S
        axes.bar(place, values.mean(), width=0.7 / len(families), color=COLOURS[outcome.family], alpha=0.75)
        axes.plot([place] * len(values), values, "o", color="black", markersize=3)
    names = [next(f"{o.task}\n{o.metric}" for o in findings.outcomes if o.task == task) for task in tasks]
    axes.set_xticks(range(len(tasks)), names)
    for family in families:
        axes.bar(0, 0, color=COLOURS[family], label=family)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(families), frameon=False)
    return figure


def scatter(findings: Findings) -> Any:
    """Training FLOPs of a window against scores."""
    figure, axes = new_figure(6, 3.6)
    for outcome in findings.outcomes:
        cost = findings.study.costs[outcome.family].flops
        mean = outcome.scale * outcome.scores.mean
        axes.plot(cost, mean, "o", color=COLOURS[outcome.family])
        axes.annotate(
            f"{outcome.family}, {outcome.task}", (cost, mean), fontsize=8, xytext=(5, 3), textcoords="offset points"
        )
    axes.margins(0.25)
    axes.set_xlabel("FLOPs of training on a window")
    axes.set_ylabel("score")
    return figure


def disagreements(findings: Findings) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    """How many examples one family gets better than another on average over seeds, and the other way round."""
    rows: list[tuple[object, ...]] = []
    for one, other in combinations(findings.outcomes, 2):
        if one.task == other.task and one.scores.examples_SN.size and other.scores.examples_SN.size:
            gap = one.scores.examples_SN.mean(0) - other.scores.examples_SN.mean(0)
            rows.append((one.task, one.family, int((gap > 0).sum()), other.family, int((gap < 0).sum()), len(gap)))
    return ("task", "family", "better on", "family", "better on", "of examples"), rows


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def picture(figure: Any) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}">'
