"""The page of a study: one file that needs no network and no script, for screens, phones and paper."""

import base64
import html
import io
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.configuration import to_yaml
from pipeline.data.objectives import Example
from pipeline.data.tasks import TASKS, Encoder, Row
from pipeline.evaluation import charts
from pipeline.evaluation.attention_maps import Map, draw_grid, find_maps
from pipeline.evaluation.cell import meta_of
from pipeline.evaluation.findings import Findings, Outcome, Pair, Table, difference_rows, example_gaps, score_rows
from pipeline.inference import load
from pipeline.model.recurrent import Recurrent

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
DRAWN_TOKENS = 24  # of a text whose attention is drawn
MOST_LETTERS = 400  # of a text that is shown
LONG = 40  # letters of a cell that is a text
FEW_PAIRS = 6  # for which more examples are shown


def page(findings: Findings) -> str:
    """The whole report."""
    title = html.escape(findings.question)
    sections = {
        "Scores": scores(findings),
        "What each model got": budgets(findings),
        "Learning curves": curves(findings),
        "By length": charts.length_curves(findings),
        "Cost and quality": costs(findings),
        "Where they disagree": disagreements(findings),
        "Samples side by side": samples(findings),
        "Where they look": attention(findings),
        "To repeat it": recipe(findings),
    }
    named = {title.lower().replace(" ", "-"): (title, body) for title, body in sections.items() if body}
    links = "".join(f'<a href="#{key}">{name}</a> ' for key, (name, _) in named.items())
    body = "".join(f'<section id="{key}"><h2>{name}</h2>{body}</section>' for key, (name, body) in named.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{title}</h1>{verdicts(findings)}<nav>{links}</nav>{body}</main></body></html>"
    )


# --- Sections ----------------------------------------------------------------------------------------------------


def verdicts(findings: Findings) -> str:
    """What the study shows, in words, task by task, and what it does not show."""
    told: dict[str, list[str]] = {}
    for about, line in findings.lines:
        told.setdefault(about, []).append(line)
    boxes = []
    for about, lines in told.items():
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        boxes.append(f'<div class="verdict"><b>{html.escape(about)}</b><ul>{items}</ul></div>')
    compared = {one.name for pair in findings.pairs for one in (pair.one, pair.other)}
    beside = [name for name in dict.fromkeys(one.name for one in findings.outcomes) if name not in compared]
    unmatched = [name for name, one in findings.study.candidates.items() if one.match is None]
    notes = [
        f"Shown beside them, outside the verdicts: {', '.join(beside)}." if beside else "",
        f"Not matched in size: {', '.join(unmatched)}." if 0 < len(unmatched) < len(findings.study.candidates) else "",
        "" if len(unmatched) < len(findings.study.candidates) else "The sizes of these models are not matched.",
        "Where there are no test rows, scores are of the dev rows, which also chose the checkpoints."
        if any(outcome.split == "val" for outcome in findings.outcomes)
        else "",
    ]
    return "".join(boxes) + f"<p>{html.escape(' '.join(filter(None, notes)))}</p>"


def scores(findings: Findings) -> str:
    """Bars, and for every task the scores and the differences with their intervals."""
    if not findings.outcomes:
        return "<p>No job is finished yet.</p>" if findings.study.tasks else ""
    parts = [plot(charts.score_bars(findings), "Means over seeds; lines are 95 % intervals of them, dots are seeds.")]
    for task, outcomes in findings.tasks.items():
        pairs = [pair for pair in findings.pairs if pair.one.task == task]
        parts += [f"<h3>{html.escape(task)}</h3>", table(without_task(score_rows(outcomes)))]
        parts += [table(without_task(difference_rows(pairs)))] if pairs else []
    note = (
        "Seed noise is the deviation from seed to seed, pooled over both models; the effect is the difference in units "
        "of it. p is for the pair alone, p of study after Holm's correction for all comparisons: verdicts go by it."
    )
    return "".join(parts) + f"<p>{note}</p>"


def budgets(findings: Findings) -> str:
    reference = "decoder" if "decoder" in findings.study.candidates else "first model"
    words = f"Ratios are to the {reference}. Block parameters leave out embeddings, output, positions and heads."
    spent = findings.tables["What the jobs took"]
    taken = "<p>What the jobs took, the mean over seeds:</p>" + table(spent) if spent[1] else ""
    return table(findings.tables["What each model got"]) + f"<p>{words}</p>" + taken


def curves(findings: Findings) -> str:
    if not findings.outcomes and not any(cell.run.rows() for cell in findings.study.pretraining()):
        return ""
    words = "Means over seeds; bands reach from the lowest to the highest."
    if findings.study.config.pretrain:
        words += " Losses of different objectives are not comparable; their shapes are."
    drawn = {name: plot(charts.learning_curves(findings, axis), words) for axis, name in charts.AXES.items()}
    return choice("axis", drawn)


def costs(findings: Findings) -> str:
    if not findings.outcomes:
        return ""
    words = "Cost is that of the task's training and of the pretraining before it; lines are 95 % intervals."
    return choice("cost", {name: plot(charts.cost_scatter(findings, key), words) for key, name in charts.COSTS.items()})


def disagreements(findings: Findings) -> str:
    """How often, and the examples on which pairs differ most."""
    counts = findings.tables["Where they disagree"]
    if not counts[1]:
        return ""
    several = 2 if len(findings.pairs) <= FEW_PAIRS else 1
    return table(counts) + "".join(examples(pair, several) for pair in findings.pairs)


def examples(pair: Pair, count: int) -> str:
    gaps = example_gaps(pair)
    order = np.argsort(-gaps, kind="stable").tolist()
    chosen = [number for number in (*order[:count], *order[::-1][:count]) if gaps[number]]
    rows: list[tuple[object, ...]] = []
    for number in dict.fromkeys(chosen):
        one, other = pair.one.answers[number], pair.other.answers[number]
        texts = (one["source"], one["expected"], one["predicted"], other["predicted"])
        rows.append((*texts, pair.one.name if gaps[number] > 0 else pair.other.name))
    header = ("source", "expected", f"{pair.one.name}, seed 1", f"{pair.other.name}, seed 1", "better over seeds")
    title = f"<h3>{html.escape(pair.one.task)}: {html.escape(pair.one.name)} and {html.escape(pair.other.name)}</h3>"
    return title + table((header, rows)) if rows else ""


def samples(findings: Findings) -> str:
    return "".join(f"<h3>{html.escape(task)}</h3>{table(rows)}" for task, rows in findings.samples.items())


def attention(findings: Findings) -> str:
    """Where the last layer of every model looks on the same example: at the source if it has one, else at itself."""
    parts: list[str] = []
    for task, outcomes in findings.tasks.items():
        short = [place for place, row in enumerate(outcomes[0].answers) if len(row["source"]) <= DRAWN_TOKENS]
        place = max(short, key=lambda place: len(outcomes[0].answers[place]["source"]), default=0)
        figures = [figure for one in outcomes if (figure := drawn_attention(one, one.answers[place]))]
        if figures:
            parts.append(f"<h3>{html.escape(task)}</h3><div class='maps'>{''.join(figures)}</div>")
    return "".join(parts)


def recipe(findings: Findings) -> str:
    """The command of the study and of every job, its settings, and the versions of all that computed it."""
    study = findings.study
    found = [meta for one in findings.outcomes[:1] for cell in one.cells[:1] if (meta := meta_of(cell))]
    versions = {"python": platform.python_version(), **(found[0]["versions"] if found else {})}
    machine = f"{platform.machine()}, {os.cpu_count()} cores; commit {found[0]['git_commit'] if found else '-'}"
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    whole = f"triptych compare --config {shlex.quote(str(study.folder / 'config.yaml'))}"
    return (
        f"<p>{html.escape(said)}; {html.escape(machine)}.</p><pre>{html.escape(whole)}</pre><p>Its settings:</p>"
        f"<pre>{html.escape(to_yaml(study.config))}</pre><p>Its jobs:</p>"
        f"<pre>{html.escape(chr(10).join(cell.line for cell in study.jobs()))}</pre>"
    )


# --- Attention ---------------------------------------------------------------------------------------------------


def drawn_attention(outcome: Outcome, row: Mapping[str, str]) -> str:
    """The heads of one layer of the first seed's model."""
    loaded = load(outcome.cells[0].run.bundle)
    model, tokenizer = loaded.bundle.model, loaded.bundle.tokenizer
    if isinstance(model, Recurrent) and model.attention is None:
        return figure(outcome.name, "<p>no attention</p>")
    example = example_of(loaded.predictor().encoder, row)
    source, target = (None if ids is None else ids.tolist()[:DRAWN_TOKENS] for ids in (example.source, example.inputs))
    chosen = last_of(find_maps(model, tokenizer, source, target, min(example.prefix, DRAWN_TOKENS)))
    drawn = io.BytesIO()
    draw_grid([chosen]).savefig(drawn, format="png", dpi=80)
    alt = html.escape(f"{chosen.kind} attention of {outcome.name}, layer {chosen.layer}, every head")
    picture = base64.b64encode(drawn.getvalue()).decode()
    return figure(outcome.name, f'<img alt="{alt}" src="data:image/png;base64,{picture}">')


def example_of(encoder: Encoder, row: Mapping[str, str]) -> Example:
    """What a model reads of an example, as its task does."""
    if TASKS[encoder.task.name].kind == "retrieval":
        return encoder.read(row["source"])
    return encoder.example(Row(row["source"], row["expected"].split(" | ")[0]))


def last_of(maps: Sequence[Map]) -> Map:
    """The last layer of cross-attention, or where nothing is written of whatever there is."""
    cross = [one for one in maps if one.kind == "cross" and len(one.queries) > 1]
    return (cross or [one for one in maps if len(one.queries) > 1] or list(maps))[-1]


# --- Pieces ------------------------------------------------------------------------------------------------------


def table(content: Table) -> str:
    header, rows = content
    head = "".join(table_cell(name, 'th scope="col"') for name in header)
    body = "".join("<tr>" + "".join(map(table_cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def table_cell(cell: object, tag: str = "td") -> str:
    """A cell, broken into lines if it is a text and cut if it is a long one."""
    text = f"{cell:,}" if isinstance(cell, int) else str(cell)
    text = text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + " …"
    kind = ' class="text"' if len(text) > LONG else ""
    return f"<{tag}{kind}>{html.escape(text)}</{tag.split()[0]}>"


def without_task(content: Table) -> Table:
    """A table but for its first column."""
    header, rows = content
    return header[1:], [row[1:] for row in rows]


def choice(name: str, panes: Mapping[str, str]) -> str:
    """Several pictures of which one is shown at a time, chosen by pointer, finger or arrow keys; paper shows all."""
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}-{number}"{" checked" if not number else ""}>'
        f'<label for="{name}-{number}">{html.escape(label)}</label>'
        for number, label in enumerate(panes)
    )
    shown = "".join(f'<div class="pane">{pane}</div>' for pane in panes.values())
    return f'<div class="choice" role="radiogroup">{inputs}{shown}</div>'


def plot(svg: str, words: str) -> str:
    caption = f"<figcaption>{html.escape(words)}</figcaption>"
    return f'<figure><div class="wide" tabindex="0">{svg}</div>{caption}</figure>'


def figure(name: str, content: str) -> str:
    return f"<figure><figcaption>{html.escape(name)}</figcaption>{content}</figure>"
