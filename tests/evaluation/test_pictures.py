"""Pictures of results, whatever the classes are named."""

from pathlib import Path

import numpy as np

from pipeline.evaluation.pictures import draw_confusion


def test_classes_may_be_prices(tmp_path: Path) -> None:
    draw_confusion(np.eye(3, dtype=np.int64), ["$", "$$", "$$$"], tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
