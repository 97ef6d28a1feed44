"""The benchmarks' own tools: what they type is understood, and what they found is drawn."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import picture, quality, tasks, training
from benchmarks.harness import arguments_of, save, small_job, typed
from pipeline.configuration import build
from pipeline.data.catalogue import ENTRIES
from pipeline.data.rows import Rows
from pipeline.data.tasks import Row
from pipeline.training.config import FinetuneConfig, PretrainConfig


def test_the_job_that_benchmarks_measure_is_understood(tmp_path: Path) -> None:
    arguments = arguments_of("some", "text").parse_args(["--data", "novels/", "--held_out", "*emma*", "*alice*"])
    options = small_job(arguments, tmp_path, model__family="decoder", trainer__max_steps=3)
    config = build(PretrainConfig, [], options)
    assert config.data.corpus == ["novels/"] and config.data.validation_books == ["*emma*", "*alice*"]
    assert (config.model.family, config.model.size, config.trainer.max_steps) == ("decoder", "small", 3)
    assert typed(options)[:2] == ["--data.corpus", '["novels/"]']


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_a_batch_in_parts_is_the_same_batch(family: str) -> None:
    batch = training.make_batch(family)
    parts = training.in_parts(batch, 4)
    assert len(parts) == batch.samples / 4
    for name in ("source_BS", "inputs_BT", "targets_BT"):
        whole, cut = getattr(batch, name), [getattr(part, name) for part in parts]
        assert cut == [None] * 4 if whole is None else torch.equal(torch.cat(cut), whole)


def test_what_was_found_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"peer": "BERT", "family": "encoder", "ratio": 1.5, "least": 1.2, "most": 1.7}
    wrote = {"model": "gpt2", "what": "greedy", "ratio": 1.9, "least": 1.8, "most": 2.0}
    curve = [{"seconds": 60, "val/loss": 6.0}, {"seconds": 120, "val/loss": 5.5}]
    jobs = [["ours", 9, 8, 10, 1, 1, 1], ["the Trainer", 6, 5, 7, 1.5, 1.4, 1.6]]
    found = {"training": {"rows": [step]}, "generation": {"rows": [wrote]}, "endtoend": {"rows": jobs}}
    for name, numbers in found.items():
        save(tmp_path / "results" / f"{name}.json", numbers)
    save(tmp_path / "results" / "quality-decoder.json", {"peer": "GPT-2", "theirs": curve, "ours": curve})
    assert picture.bars(json.loads(json.dumps(found))) == [
        ("training step", "BERT (encoder)", 1.5, 1.2, 1.7),
        ("whole job", "pretrain, the Trainer", 1.5, 1.4, 1.6),
        ("writing", "gpt2, greedy", 1.9, 1.8, 2.0),
    ]
    drawn = tmp_path / "speed.png"
    monkeypatch.setattr(sys, "argv", ["picture", "--results", str(tmp_path / "results"), "--output", str(drawn)])
    picture.main()
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_peer_is_tuned_until_its_best_rate_lies_between_others() -> None:
    assert set(quality.tune(lambda rate: abs(rate - 2e-3))) == {1e-3, 2e-3, 4e-3}
    assert set(quality.tune(lambda rate: abs(rate - 6e-4))) == {2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3}
    assert max(quality.tune(lambda rate: abs(rate - 1e-2))) == 16e-3
    assert len(quality.tune(lambda rate: rate)) == quality.MOST_RATES  # and no more if lower is always better


def test_the_settings_of_the_tasks_are_understood() -> None:
    settings = yaml.safe_load(Path(tasks.__file__).with_suffix(".yaml").read_text())
    starts = settings["pretrain"]["starts"]
    for name, start in starts.items():
        configs, options = tasks.start_of(settings["pretrain"], name, Path("out"))
        config = build(PretrainConfig, [Path(file) for file in configs[1::2]], tasks.as_typed(options))
        assert config.model.family == start["family"] and start.get("from") in (None, *starts)
        assert config.init_from == (f"out/{start['from']}/bundle" if "from" in start else None)
        assert start.get("catalogue") in (None, *ENTRIES)
    for name, task in settings["tasks"].items():
        for given in task["runs"].values():
            options = task["options"] | {key: value for key, value in given.items() if key != "start"}
            options |= settings["scratch"] if "model.family" in given else {}
            assert task["catalogue"] in ENTRIES
            tuned = build(FinetuneConfig, [Path(file) for file in task["configs"]], tasks.as_typed(options))
            assert tuned.task.name == name.partition("-")[0] and given.get("start") in (None, *starts)


def test_counted_words_are_a_baseline() -> None:
    rows = [Row(f"a {word} film", label=str(label)) for label, word in enumerate(("bad", "good"))] * 5
    assert tasks.tfidf(Rows(rows, rows)) == 1.0


def test_numbers_of_other_tasks_stay(tmp_path: Path) -> None:
    before = [{"task": task, "run": "encoder", "mean": 0.7} for task in ("sentiment", "retrieval")]
    save(tmp_path / "tasks.json", before)
    found = [{"task": "sentiment", "run": "encoder", "mean": 0.8}]
    assert tasks.kept(tmp_path / "tasks.json", found) == before[1:]
    assert tasks.kept(tmp_path / "none.json", found) == []
