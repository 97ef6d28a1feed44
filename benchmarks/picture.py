"""What was measured beside peers as one picture.

    python -m benchmarks.picture --results benchmarks/results --output benchmarks/speed.png

Left: how many times as fast as the peer, with the least and the most of the rounds. Right: the loss on held-out novels
over the minutes of training, ours and the peer's.
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.files import read_json

KINDS = {"training step": "#2a78b5", "whole job": "#1b9e77", "writing": "#c46a1b"}
Bar = tuple[str, str, float, float, float]  # kind, name, ratio, least, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/speed.png"))
    arguments = parser.parse_args()
    found = {path.stem: read_json(path) for path in sorted(arguments.results.glob("*.json"))}
    curves = [found[name] for name in sorted(found) if name.startswith("quality-")]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_bars(left, bars(found))
    draw_curves(right, curves)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=120)


def bars(found: dict[str, Any]) -> list[Bar]:
    """Every ratio that was measured."""
    rows: list[Bar] = []
    for row in found.get("training", {"rows": []})["rows"]:
        rows.append(("training step", f"{row['peer']} ({row['family']})", row["ratio"], row["least"], row["most"]))
    for name, *_, ratio, least, most in found.get("endtoend", {"rows": []})["rows"][1:]:
        rows.append(("whole job", f"pretrain, {name}", ratio, least, most))
    for row in found.get("generation", {"rows": []})["rows"]:
        rows.append(("writing", f"{row['model']}, {row['what']}", row["ratio"], row["least"], row["most"]))
    return rows


def draw_bars(axes: Any, rows: list[Bar]) -> None:
    for place, (kind, _, ratio, least, most) in enumerate(rows):
        axes.barh(place, ratio, color=KINDS[kind], height=0.7)
        axes.plot([least, most], [place, place], color="black", linewidth=1)
        axes.text(max(ratio, most) + 0.03, place, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for _, name, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max((most for *_, most in rows), default=1))  # room for the numbers
    axes.set_xlabel("times the peer's speed")
    axes.set_title("training step (blue), whole job (green), writing (orange)", fontsize=10)


def draw_curves(axes: Any, curves: list[Any]) -> None:
    for number, curve in enumerate(curves):
        for who, style in (("theirs", "--"), ("ours", "-")):
            points = [(row["seconds"] / 60, row["val/loss"]) for row in curve[who]]
            label = curve["peer"] if who == "theirs" else f"ours, beside {curve['peer']}"
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", marker="o", markersize=3, label=label)
    axes.set_xlabel("minutes")
    axes.set_ylabel("nats a predicted token, held-out novels")
    axes.set_title("time to quality", fontsize=10)
    if curves:
        axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
