"""The report of a study in all its forms: a page, Markdown, CSV, and what W&B makes one from."""

import csv
import io
from pathlib import Path

from pipeline.evaluation.findings import Findings, Table, difference_rows, disagreement_rows, score_rows, spent_rows
from pipeline.evaluation.page import commands, page
from pipeline.evaluation.plan import plan_rows
from pipeline.evaluation.publication import markdown_table, specification
from pipeline.files import read_json, write_json, write_text
from pipeline.terminal import print_table, say
from pipeline.training.server import REPORT


def write_report(findings: Findings) -> Path:
    """Write report.html, report.md, the tables as CSV and the report for W&B; print the findings; return the page."""
    folder = findings.study.folder
    scores, differences = score_rows(findings.outcomes), difference_rows(findings.pairs)
    print_table("Scores", *scores)
    print_table("Differences", *differences)
    for pair in findings.pairs:
        say(f"{pair.one.task}: {pair.sentence}")
    for line in findings.failed:
        say(f"failed: {line}")
    write_text(folder / "scores.csv", as_csv(scores))
    write_text(folder / "differences.csv", as_csv(differences))
    write_text(folder / "report.md", markdown(findings))
    write_text(folder / "report.html", page(findings))
    published = read_json(folder / REPORT) if (folder / REPORT).is_file() else {}
    kept = {key: published[key] for key in ("id", "url") if key in published}
    write_json(folder / REPORT, specification(findings) | kept)
    return folder / "report.html"


def as_csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([table[0], *table[1]])
    return text.getvalue()


def markdown(findings: Findings) -> str:
    """The words and tables of the page."""
    study = findings.study
    lines = [f"# {findings.question}", ""]
    lines += [f"- **{pair.one.task}**: {pair.sentence}" for pair in findings.pairs]
    lines += [f"- failed: {line}" for line in findings.failed]
    tables = {
        "Scores": score_rows(findings.outcomes),
        "Differences": difference_rows(findings.pairs),
        "What each model got": plan_rows(study.candidates, bool(study.config.pretrain)),
        "What the jobs took": spent_rows(findings),
        "Where they disagree": disagreement_rows(findings),
    }
    for title, table in ((title, table) for title, table in tables.items() if table[1]):
        lines += ["", f"## {title}", "", *markdown_table(table)]
    lines += ["", "## To repeat it", "", "```", *commands(study), "```"]
    return "\n".join(lines) + "\n"
