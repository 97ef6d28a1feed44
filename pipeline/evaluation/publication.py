"""The report of a study for W&B, as plain data: words, tables, and panels over the runs of the study's group."""

from collections.abc import Sequence
from typing import Any

from pipeline.data.tasks import TASKS
from pipeline.evaluation.findings import Findings, Outcome, Table, difference_rows
from pipeline.evaluation.plan import plan_rows

BY_MODEL = {"groupby": "config.model_name", "groupby_aggfunc": "mean"}
SHOWN = 3  # samples of a task


def specification(findings: Findings) -> dict[str, Any]:
    """All that `sync` makes a report from: blocks and panels by their names in wandb-workspaces."""
    study = findings.study
    first = next(iter((*study.pretraining(), *study.cells())))
    tracking = first.config.tracking
    sentences = [f"- **{pair.one.task}**: {pair.sentence}" for pair in findings.pairs]
    blocks = [words("\n".join([*sentences, *(f"- failed: {line}" for line in findings.failed)]))]
    blocks += [heading("Scores, mean ± deviation over seeds"), words(mean_and_deviation(findings.outcomes))]
    if findings.pairs:
        blocks += [heading("Differences"), words("\n".join(markdown_table(difference_rows(findings.pairs))))]
    got = plan_rows(study.candidates, bool(study.config.pretrain))
    blocks += [heading("What each model got"), words("\n".join(markdown_table(got)))]
    if study.config.pretrain:
        blocks += [heading("Pretraining"), grid(first.study.name, {"stage": "pretrain"}, curves("val/loss"))]
    for task, outcomes in findings.tasks.items():
        blocks += [heading(task), *task_blocks(task, outcomes)]
    return {
        "title": findings.question[:128],
        "project": tracking.project,
        "entity": tracking.entity,
        "description": f"The runs of the group {first.study.name}.",
        "blocks": [block for block in blocks if block.get("text") != ""],
    }


def task_blocks(task: str, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Curves, bars with deviations, cost against quality, and samples of one task."""
    cell, first = outcomes[0].cells[0], outcomes[0]
    score = f"final/{first.split}/{first.metric}"
    config: Any = cell.config
    kind = TASKS[config.task.name].kind
    samples = f"{first.split}/{'mistakes' if kind == 'classification' else 'samples'}"
    panels = [
        *curves(f"val/{first.metric}"),
        {"panel": "BarPlot", "title": task, "metrics": [score], "groupby_rangefunc": "stddev"} | BY_MODEL,
        {"panel": "ScatterPlot", "title": "cost and quality", "x": "flops", "y": score},
        {"panel": "WeavePanelSummaryTable", "table_name": samples},
    ]
    return [
        grid(cell.study.name, {"stage": "finetune", "task": config.task.name}, panels),
        words(side_by_side(outcomes)),
    ]


def curves(metric: str) -> list[dict[str, Any]]:
    """A metric over tokens and over FLOPs, a line for every model with the band over its seeds."""
    line = {"panel": "LinePlot", "y": [metric], "groupby_rangefunc": "minmax"} | BY_MODEL
    return [line | {"title": f"{metric} over {axis}", "x": axis} for axis in ("tokens", "flops")]


def mean_and_deviation(outcomes: list[Outcome]) -> str:
    """The table that W&B's own cannot make."""
    rows: list[tuple[object, ...]] = []
    for one in outcomes:
        spread = "" if one.scores.deviation is None else f" ± {one.scale * one.scores.deviation:.2f}"
        rows.append((one.task, one.name, one.measure, len(one.values), f"{one.mean:.2f}{spread}"))
    return "\n".join(markdown_table((("task", "model", "metric", "seeds", "score"), rows)))


def side_by_side(outcomes: list[Outcome]) -> str:
    """The first examples as every model answers them."""
    rows: list[tuple[object, ...]] = []
    for number in range(min(SHOWN, *(len(one.answers) for one in outcomes))):
        example = outcomes[0].answers[number]
        rows.append((example["source"], "expected", example["expected"]))
        rows += [("", one.name, one.answers[number]["predicted"]) for one in outcomes]
    return "\n".join(markdown_table((("source", "model", "answer of seed 1"), rows)))


def markdown_table(table: Table) -> list[str]:
    header, rows = table
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(cell_text, row)) + " |" for row in rows]


def cell_text(cell: object) -> str:
    """A cell of a Markdown table, which must stay on its line and between its bars."""
    return " ".join(str(cell).split()).replace("|", "\\|")[:300]


def heading(text: str) -> dict[str, Any]:
    return {"block": "H2", "text": text}


def words(text: str) -> dict[str, Any]:
    return {"block": "MarkdownBlock", "text": text}


def grid(group: str, where: dict[str, str], panels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Panels over those runs of the group that a config key tells."""
    filters = [f"Group = '{group}'", *(f"Config('{key}') = '{value}'" for key, value in where.items())]
    return {"block": "PanelGrid", "filters": " and ".join(filters), "panels": list(panels)}
