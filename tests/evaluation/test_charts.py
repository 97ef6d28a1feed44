"""Charts show every seed that has something to show, in the order of the axis."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline.evaluation.charts import Chart, by_length, draw_band
from pipeline.evaluation.findings import Outcome
from pipeline.evaluation.metrics import BY_LENGTH
from pipeline.evaluation.study import Study
from pipeline.training.run import Run

STUDY = cast(Study, SimpleNamespace(candidates=["encoder"]))


def test_a_seed_that_has_not_begun_does_not_hide_the_others() -> None:
    chart = Chart(STUDY, "chart", ["task"], 4.0)
    draw_band(chart, chart.panels[0], "encoder", [[(1, 4.0), (2, 2.0)], [], [(1, 2.0), (2, 1.0)]], "tokens")
    assert chart.words == ["encoder: 3 (2 to 4) at 1 tokens", "encoder: 1.5 (1 to 2) at 2 tokens"]
    assert "encoder: 3 (2 to 4)" in chart.svg("a chart")
    empty = Chart(STUDY, "empty", ["task"], 4.0)
    draw_band(empty, empty.panels[0], "encoder", [[], []], "tokens")
    assert not empty.words


def test_a_task_may_be_named_by_prices() -> None:
    assert ">$$<" in Chart(STUDY, "prices", ["$$"], 4.0).svg("a chart")


def test_lengths_are_in_order(tmp_path: Path) -> None:
    scores: dict[str, Any] = {f"test/{BY_LENGTH}{length}": length / 100 for length in (100, 5, 20)}
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "meta.json").write_text(json.dumps({"metrics": scores | {"test/exact_match": 1.0}}))
    cell = SimpleNamespace(run=Run(tmp_path), folder=tmp_path)
    outcome = cast(Outcome, SimpleNamespace(split="test", cells=[cell]))
    assert by_length(outcome) == [[(5, 5.0), (20, 20.0), (100, 100.0)]]
