"""`make chaos`: try to break the pipeline in every way we know, and print what became of it."""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.faults import try_faults
from chaos.inputs import try_inputs
from chaos.load import try_load
from chaos.material import Material
from chaos.processes import PROJECT
from chaos.untrusted import try_rights, try_secrets, try_traps

Rows = list[tuple[Any, ...]]
Part = Callable[[Material, Path, argparse.Namespace], tuple[list[Any], Rows]]
"""Do a part: what was found, and the rows of its table, in whose last column a number or word says what broke."""


def main() -> int:
    options = parse()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="triptych-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # another user does a part of it
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)}
    os.chdir(PROJECT)
    made, held = Material(folder / "material"), True
    for name in options.parts or PARTS:
        began, (part, title, header) = time.monotonic(), PARTS[name]
        found, rows = part(made, folder / name, options)
        spent = f"Seed {options.seed}, {(time.monotonic() - began) / 60:.0f} minutes."
        table = f"### {title}\n\n{as_table(header, rows)}\n{spent}\n"
        sys.stdout.write(f"\n{table}")
        if options.save:
            record = {"seed": options.seed, "table": table, "found": [asdict(one) for one in found]}
            record_of(name).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            write_page()
        held = held and all(row[-1] in (0, "held") for row in rows)
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if held else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--cases", type=int, default=10_000, help="cases of bad input")
    parser.add_argument("--times", type=int, default=50, help="kills; other faults are tried in proportion")
    parser.add_argument("--scale", type=float, default=1.0, help="load, as a share of the full sizes")
    parser.add_argument("--only", default="", help="only faults or loads whose name holds this")
    parser.add_argument("--seed", type=int, default=1, help="decides every case and moment")
    parser.add_argument(
        "--save", action="store_true", help="keep what was found in benchmarks/, also in its RESULTS.md"
    )
    parser.add_argument("--folder", help="where to work; by default a temporary folder that is deleted")
    return parser.parse_args()


def inputs(made: Material, folder: Path, options: argparse.Namespace) -> tuple[list[Any], Rows]:
    found = list(try_inputs(made, folder, options.cases, options.seed))
    rows: Rows = [
        (one.name, one.cases, one.accepted, one.refused, one.cases - one.accepted - one.refused) for one in found
    ]
    return found, [*rows, ("all", *(sum(row[column] for row in rows) for column in range(1, 5)))]


def faults(made: Material, folder: Path, options: argparse.Namespace) -> tuple[list[Any], Rows]:
    found = list(try_faults(made, folder, options.times, options.seed, options.only))
    rows: Rows = [(one.name, one.how, one.times, one.times - len(one.lost), len(one.lost)) for one in found]
    return found, [*rows, ("all", "", *(sum(row[column] for row in rows) for column in (2, 3, 4)))]


def untrusted(made: Material, folder: Path, options: argparse.Namespace) -> tuple[list[Any], Rows]:
    found = [*try_traps(made, folder), *try_secrets(made, folder), *try_rights(made, folder)]
    return found, [(one.name, one.ended, one.wrong or "held") for one in found]


def load(made: Material, folder: Path, options: argparse.Namespace) -> tuple[list[Any], Rows]:
    found = list(try_load(made, folder, options.scale, options.only))
    return found, [
        (one.name, one.did, round(one.seconds), round(one.peak_megabytes), one.wrong or "held") for one in found
    ]


PARTS: dict[str, tuple[Part, str, tuple[str, ...]]] = {
    "inputs": (
        inputs,
        "Bad input",
        ("input", "cases", "used, or skipped and counted", "refused in one line", "broken"),
    ),
    "faults": (faults, "Faults", ("fault", "how", "times tried", "survived", "lost")),
    "untrusted": (untrusted, "Untrusted files, secrets, rights", ("what", "how it ended", "")),
    "load": (load, "Load", ("load", "what", "seconds", "peak MB", "")),
}


def as_table(header: tuple[str, ...], rows: Rows) -> str:
    """A table in Markdown."""
    rule = ["---:" if all(isinstance(row[column], int) for row in rows) else "---" for column in range(len(header))]
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "/") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *cells))


def record_of(part: str) -> Path:
    return PROJECT / "benchmarks" / "results" / f"chaos-{part}.json"


def write_page() -> None:
    """Put the newest table of every part into the page of results."""
    path = PROJECT / "benchmarks" / "RESULTS.md"
    before, _, after = re.split(
        "(?<=<!-- made by make chaos -->\n)(.*)(?=<!-- until here -->)", path.read_text(), flags=re.S
    )
    tables = [json.loads(record_of(part).read_text())["table"] for part in PARTS if record_of(part).exists()]
    path.write_text(before + "\n" + "\n".join(tables) + "\n" + after)


if __name__ == "__main__":
    sys.exit(main())
