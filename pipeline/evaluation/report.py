"""The report of a study in all its forms: a page, Markdown, CSV, and what W&B makes one from."""

import csv
import io
from pathlib import Path

from pipeline.evaluation.findings import Findings, Table
from pipeline.evaluation.page import page
from pipeline.evaluation.publication import listed, markdown_table, specification
from pipeline.files import read_json, write_json, write_text
from pipeline.terminal import print_table, say
from pipeline.training.server import REPORT


def write_report(findings: Findings) -> Path:
    """Write report.html, report.md, the tables as CSV and the report for W&B; print the findings; return the page."""
    folder = findings.study.folder
    for title in ("Scores", "Differences"):
        print_table(title, *findings.tables[title])
        write_text(folder / f"{title.lower()}.csv", as_csv(findings.tables[title]))
    for about, line in findings.lines:
        say(f"{about}: {line}")
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
    lines = [f"# {findings.question}", "", listed(findings)]
    for title, table in findings.tables.items():
        lines += ["", f"## {title}", "", markdown_table(table)] if table[1] else []
    lines += ["", "## To repeat it", "", "```", *(cell.line for cell in findings.study.jobs()), "```"]
    return "\n".join(lines) + "\n"
