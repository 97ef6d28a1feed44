"""Learning curves of runs as a picture, and their last metrics as a table.

python -m benchmarks.curves runs/encoder runs/decoder --output benchmarks/pretraining.png
"""

import argparse
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.terminal import print_table
from pipeline.training.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/curves.png"), help="the picture")
    arguments = parser.parse_args()
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    table = []
    for folder in arguments.runs:
        run = Run(folder)
        training = [(row["tokens"], row["train/loss"]) for row in run.rows() if "train/loss" in row]
        held_out = [(row["tokens"], row["val/loss"]) for row in run.rows() if "val/loss" in row]
        (line,) = axes.plot(*zip(*training, strict=True), alpha=0.35, linewidth=1)
        axes.plot(*zip(*held_out, strict=True), color=line.get_color(), marker="o", markersize=4, label=folder.name)
        last, measured = run.rows()[-1], run.last_measured()
        table.append(
            (
                folder.name, last["step"], last["tokens"], f"{last['flops']:.3g}", round(last["seconds"] / 60, 1),
                *(measured.get(key, "-") for key in ("val/loss", "val/bits_per_byte", "val/gap")),
            )
        )  # fmt: skip
    axes.set_xlabel("raw tokens")
    axes.set_ylabel("nats a predicted token (objectives differ)")
    axes.set_title("thin: training; dots: held-out novels at pinned masks", fontsize=10)
    axes.legend()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=120)
    print_table(
        "Runs", ("run", "steps", "tokens", "FLOPs", "minutes", "val/loss", "val/bits_per_byte", "val/gap"), table
    )


if __name__ == "__main__":
    main()
