"""The report of a study for W&B, as plain data: words, tables, and panels over the runs of the study's group."""

from collections.abc import Sequence
from typing import Any

from pipeline.data.tasks import TASKS
from pipeline.evaluation.findings import Findings, Outcome, Table

BY_MODEL = {"groupby": "config.model_name", "groupby_aggfunc": "mean"}


def specification(findings: Findings) -> dict[str, Any]:
    """All that `sync` makes a report from: blocks and panels by their names in wandb-workspaces."""
    study = findings.study
    group, tracking = study.folder.name, study.jobs()[0].config.tracking
    blocks = [words(listed(findings))]
    blocks += [heading("Scores, mean ± deviation over seeds"), words(mean_and_deviation(findings.outcomes))]
    for title in ("Differences", "What each model got"):
        if findings.tables[title][1]:
            blocks += [heading(title), words(markdown_table(findings.tables[title]))]
    if study.config.pretrain:
        blocks += [heading("Pretraining"), grid(group, {"stage": "pretrain"}, curves("val/loss"))]
    for task, outcomes in findings.tasks.items():
        blocks += [heading(task), task_panels(task, outcomes), words(markdown_table(findings.samples[task]))]
    return {
        "title": findings.question[:128],
        "project": tracking.project,
        "entity": tracking.entity,
        "description": f"The runs of the group {group}.",
        "blocks": [block for block in blocks if block.get("text") != ""],
    }


def task_panels(task: str, outcomes: list[Outcome]) -> dict[str, Any]:
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
    return grid(cell.study.name, {"stage": "finetune", "task": config.task.name}, panels)


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
    return markdown_table((("task", "model", "metric", "seeds", "score"), rows))


def listed(findings: Findings) -> str:
    """The findings in words as a list in Markdown."""
    return "\n".join(f"- **{about}**: {line}" for about, line in findings.lines)


def markdown_table(table: Table) -> str:
    header, *rows = ("| " + " | ".join(map(cell_text, row)) + " |" for row in (table[0], *table[1]))
    return "\n".join([header, "|" + "---|" * len(table[0]), *rows])


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
