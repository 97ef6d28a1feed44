"""Pictures of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.files import replacing

MOST_NUMBERS = 20  # classes; more cannot be read in the cells


def draw_confusion(counts: npt.NDArray[np.int64], labels: Sequence[str], path: Path) -> None:
    """How often each class (rows) was taken for each (columns): the darker, the larger its share of the row."""
    from matplotlib.figure import Figure

    side = 2.2 + 0.45 * min(len(labels), 2 * MOST_NUMBERS)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_xticks(range(len(labels)), labels=labels, rotation=90, parse_math=False)  # a class may be named $$
    axes.set_yticks(range(len(labels)), labels=labels, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("expected")
    for (row, column), count in np.ndenumerate(counts) if len(labels) <= MOST_NUMBERS else ():
        shade = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count:,}", ha="center", va="center", color=shade, fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
