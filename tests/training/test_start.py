"""Where a model starts: what a bundle brings along, and which settings count beside it."""

from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.bundle import load_bundle
from pipeline.tokenizer import Tokenizer
from tests.training.jobs import arguments, write_novels
from tests.training.test_finetune import reviews, words, write_rows

SHORT: dict[str, Any] = {"trainer__max_steps": 1, "tracking__samples_every": 0}


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels", count=3, paragraphs=6)


def test_the_tokenizer_of_a_classifier_brings_nothing_else_along(novels: Path, tmp_path: Path) -> None:
    """Its labels would ask for a head that the new model has not."""
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", reviews(40, 1))
    assert cli.main(words(tmp_path, tmp_path / "task", trainer__max_epochs=1)) == 0
    classifier = tmp_path / "task" / "bundle"
    assert cli.main(arguments(novels, tmp_path / "run", data__tokenizer=classifier, **SHORT)) == 0
    own, bundle = Tokenizer.load(tmp_path / "task" / "tokenizer"), load_bundle(tmp_path / "run" / "bundle")
    assert Tokenizer.load(classifier).meta == own.meta
    assert bundle.tokenizer.fingerprint == own.fingerprint
    assert not {"labels", "task", "pooling", "generation", "rows_fingerprint", "trained_on"} & bundle.meta.keys()


def test_how_a_decoder_reads_a_source_can_be_named_anew_for_a_bundle(
    novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In pretraining and in fine-tuning alike, and no warning says otherwise."""
    assert cli.main(arguments(novels, tmp_path / "causal", **SHORT)) == 0
    start: dict[str, Any] = {
        "init_from": tmp_path / "causal" / "bundle",
        "model__prefix_attention": "bidirectional",
    } | SHORT
    reversal = {"task__examples": 40, "task__longest": 8, "generation__max_new_tokens": 4}
    del start["tracking__samples_every"]
    made = {
        "pretrained": arguments(novels, tmp_path / "pretrained", **start),
        "tuned": words(tmp_path, tmp_path / "tuned", "reversal", **start, **reversal, model__family="decoder"),
    }
    for name, command in made.items():
        capsys.readouterr()
        assert cli.main(command) == 0
        assert "have no effect" not in capsys.readouterr().err
        assert load_bundle(tmp_path / name / "bundle").model.architecture.prefix_attention == "bidirectional"
    assert load_bundle(tmp_path / "causal" / "bundle").model.architecture.prefix_attention == "causal"
