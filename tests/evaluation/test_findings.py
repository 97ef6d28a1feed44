"""What is said of an answer is true of it."""

from types import SimpleNamespace
from typing import cast

from pipeline.evaluation.findings import Outcome, sample_rows
from pipeline.evaluation.metrics import score_translations


def test_a_translation_is_shown_with_the_score_that_is_named() -> None:
    """Of one sentence alone, for which that of the sentence is that of the corpus."""
    told = score_translations(["the old captain saw a ship"], [["the old captain saw the ship"]])
    answer = {"source": "x", "expected": "y", "predicted": "z", "score": told.alone[0]}
    outcome = cast(Outcome, SimpleNamespace(name="decoder", metric="bleu", scale=1.0, answers=[answer]))
    (title, _), (_, row) = sample_rows([outcome])
    named = title.removeprefix("seed 1 (").removesuffix(")")
    assert row == ("decoder", f"({told.metrics[named]:.0f}) z")
