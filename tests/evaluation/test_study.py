"""A study in miniature: matched, run, killed, continued, split, and told in words."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipeline import cli
from pipeline.bundle import make_model
from pipeline.configuration import build
from pipeline.data.batch import Batch
from pipeline.data.config import OBJECTIVES, ObjectiveConfig, TokenizerConfig
from pipeline.data.objectives import IGNORED, Vocabulary, current, make_example
from pipeline.errors import UserError
from pipeline.evaluation import calibration
from pipeline.evaluation import study as study_module
from pipeline.evaluation.cell import Cell, content_hash, result_of
from pipeline.evaluation.config import StudyConfig
from pipeline.evaluation.matching import cost_of, lengths, matched
from pipeline.evaluation.plan import PLAN
from pipeline.evaluation.predicting import Predictor
from pipeline.evaluation.study import Study, plan_study
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.recurrent import Recurrent
from pipeline.tokenizer import Tokenizer, train
from pipeline.training.config import FinetuneConfig, PretrainConfig
from pipeline.training.module import training_flops
from pipeline.training.run import Run, is_locked
from tests.evaluation.miniature import command, write_study

PROJECT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("size", ["mini", "small", "base"])
@pytest.mark.parametrize("rule", ["parameters", "flops"])
@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_families_are_matched_to_within_a_percent(family: Any, rule: Any, size: Any) -> None:
    reference = ModelConfig(family="decoder", size=size)
    objective = ObjectiveConfig(name=OBJECTIVES[family][0])
    model = resolve(matched(replace(reference, family=family), reference, rule, 8192, 256, objective))
    decoder = resolve(reference)
    assert (model.width, model.head_width) == (decoder.width, decoder.head_width)
    goal = cost_of(decoder, 8192, 256, ObjectiveConfig(name="causal"))
    found = cost_of(model, 8192, 256, objective)
    assert abs(getattr(found, rule) / getattr(goal, rule) - 1) <= 0.01


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return train(["abcd dcba"] * 9, TokenizerConfig(kind="character"), "")


@pytest.mark.parametrize(
    "family, settings",
    [
        ("encoder", {"rate": 0.15, "final_rate": 0.45}),
        ("decoder", {"name": "causal"}),
        ("decoder", {"name": "prefix"}),
        ("decoder", {"name": "masked", "rate": 0.3}),
        ("decoder", {"name": "hybrid", "causal_share": 0.25}),
        ("decoder", {"schedule": {"causal": 0.25, "prefix": 0.75}}),
        ("encoder-decoder", {"name": "prefix"}),
        ("encoder-decoder", {"name": "span", "final_rate": 0.45}),
        ("encoder-decoder", {"schedule": {"span": 0.5, "prefix": 0.5}}),
        ("recurrent", {}),
    ],
)
def test_planned_lengths_are_those_of_real_examples(family: Any, settings: Any, characters: Tokenizer) -> None:
    """Over a whole run, in the mean of many windows, to within a fiftieth of a window."""
    objective, vocabulary = ObjectiveConfig(**settings), Vocabulary.of(characters)
    window, generator, found = 256, np.random.default_rng(1), []
    for progress in np.linspace(0, 1, 2000, endpoint=False):
        ids = generator.choice(vocabulary.ordinary, window)
        one = make_example(ids, family, current(objective, progress), vocabulary, generator)
        sides = (len(part) if part is not None else 0 for part in (one.source, one.inputs))
        found.append((*sides, int((one.targets != IGNORED).sum())))
    model = resolve(ModelConfig(family=family, size="tiny"))
    assert np.abs(np.mean(found, 0) - lengths(model, window, objective)).max() < window / 50


def test_a_decoder_of_another_objective_is_matched_in_flops() -> None:
    reference, objective = ModelConfig(family="decoder", size="mini"), ObjectiveConfig(name="prefix")
    model = matched(reference, reference, "flops", 8192, 256, objective)
    goal = cost_of(resolve(reference), 8192, 256, ObjectiveConfig(name="causal")).flops
    assert abs(cost_of(resolve(model), 8192, 256, objective).flops / goal - 1) <= 0.01
    assert matched(reference, reference, "flops", 8192, 256, ObjectiveConfig()) == reference
    assert matched(reference, reference, "parameters", 8192, 256, objective) == reference


def test_the_flops_of_a_recurrent_model_are_planned_as_they_are_counted() -> None:
    model = make_model(resolve(ModelConfig(family="recurrent", size="tiny", cell="lstm", alignment="general")), 300)
    ids = torch.zeros(5, 16, dtype=torch.long)
    batch = Batch(source_BS=None, source_real_BS=None, inputs_BT=ids, inputs_real_BT=None, targets_BT=ids,
                  prefix_B=None, tokens=80, samples=5, loss_positions=80)  # fmt: skip
    planned = cost_of(model.architecture, 300, 16, ObjectiveConfig()).flops
    assert training_flops(model, batch) == 5 * planned
    assert isinstance(model, Recurrent)
    cell = sum(parameter.numel() for parameter in model.decoder.layers.parameters())
    assert planned == 6 * 16 * (cell + 300 * model.architecture.width)


def test_tables_of_positions_are_no_blocks_of_a_recurrent_model() -> None:
    model = ModelConfig(family="recurrent", size="tiny")
    learned = replace(model, position="learned")
    without, tables = (cost_of(resolve(one), 300, 16, ObjectiveConfig()) for one in (model, learned))
    assert without.parameters == tables.parameters
    assert tables.all_parameters - without.all_parameters == 2 * 512 * 128


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def settings(written: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Of a study that is not yet begun."""
    return written | {"run_dir": str(tmp_path / "study")}


def planned(settings: dict[str, Any], **more: Any) -> Study:
    return plan_study(build(StudyConfig, [], settings | more))


def pretend(cell: Cell, score: float = 0.5) -> None:
    """Make a job look finished."""
    (cell.folder / "bundle").mkdir(parents=True)
    answers = [{"source": "a", "expected": "0", "predicted": "0", "score": score}] * 4
    (cell.folder / "val-predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    meta = {"task": {"name": "sentiment"}, "metrics": {"val/accuracy": score}, "versions": {}, "git_commit": None}
    (cell.folder / "bundle" / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of jobs, all of which fail."""
    found: list[list[str]] = []

    def run(words: list[str], prepared: bool) -> int:
        assert prepared, "a job of one process need not import everything again"
        found.append(words)
        return 1

    monkeypatch.setattr(study_module, "run_command", run)
    return found


# --- The plan ----------------------------------------------------------------------------------------------------


def test_every_command_says_what_its_job_is(settings: dict[str, Any]) -> None:
    """What is run and printed gives the settings that the job is named and checked by."""
    variants = '{"low": {"model.family": "decoder", "objective.name": "prefix", "optim.lr": 0.002, "model.layers": 3}}'
    study = planned(settings, variants=variants, learning_rates="[0.001]", seeds="1")
    assert len(study.jobs()) == len({cell.folder for cell in study.jobs()}) == 8
    scratch = {"pretrain": "[]", "pretrain_options": "{}", "task_options": '{"model.dropout": "0.3"}'}
    dropout = planned(settings, task_options='{"model.dropout": "0.3"}')
    for cell in (*study.jobs(), *planned(settings, **scratch).jobs(), *dropout.jobs()):
        kind: type[Any] = PretrainConfig if cell.stage == "pretrain" else FinetuneConfig
        typed = build(kind, [Path(file) for file in cell.files], cell.given)
        for name in ("model", "objective", "optim", "trainer", "data", "seed", "task"):
            assert getattr(typed, name, None) == getattr(cell.config, name, None), (cell.name, name)
        assert typed.run_dir == str(cell.folder) and typed.tracking.group == "study"
        assert typed.tracking.labels["model_name"] == cell.candidate.name and cell.stage in typed.tracking.tags


def test_jobs_are_named_by_what_they_learn_from(settings: dict[str, Any], tmp_path: Path) -> None:
    """Other settings, rows or parents make another job; where it is done and tracked does not."""

    def folders(**more: Any) -> list[str]:
        content_hash.cache_clear()
        study = planned(settings, **more)
        return [cell.folder.name for cell in (*study.pretraining(), *study.cells())]

    before = folders()
    assert folders(run_dir=str(tmp_path / "other")) == before
    longer = folders(pretrain_options='{"trainer.max_steps": "5"}')
    assert not set(before) & set(longer), "a task does not see that its pretraining changed"
    tuned = folders(task_options='{"trainer.max_steps": "6"}')
    assert tuned[:6] == before[:6] and not set(before[6:]) & set(tuned)
    first = Path(json.loads(settings["tasks"])[0])
    copied = shutil.copytree(first.parent, tmp_path / "copy") / first.name
    copied.write_text(copied.read_text().replace(str(first.parent), str(copied.parent)))
    here = folders(tasks=json.dumps([str(copied)]), skip="[]")
    rows = copied.parent / "train.jsonl"
    rows.write_text(rows.read_text().replace("lovely", "awful"))
    changed = folders(tasks=json.dumps([str(copied)]), skip="[]")
    assert here[:6] == changed[:6] and not set(here[6:]) & set(changed), "other rows at the same place are not seen"


def test_settings_of_a_model_that_starts_from_a_bundle_name_its_jobs(settings: dict[str, Any], tmp_path: Path) -> None:
    """A dropout beside the pretrained model, a bundle to start from, and the content of the user's own function."""

    def folders(**more: Any) -> set[str]:
        content_hash.cache_clear()
        return {cell.folder.name for cell in planned(settings, **more).cells()}

    assert not folders(task_options='{"model.dropout": "0.1"}') & folders(task_options='{"model.dropout": "0.3"}')
    scratch = {"pretrain": "[]", "pretrain_options": "{}", "families": '["decoder"]'}
    assert not folders(**scratch) & folders(**scratch, task_options='{"init_from": "runs/other/bundle"}')
    own = tmp_path / "own.py"
    own.write_text("def change(row): return row")
    before = folders(task_options=json.dumps({"task.function": f"{own}:change"}))
    own.write_text("def change(row): return {**row}")
    assert not before & folders(task_options=json.dumps({"task.function": f"{own}:change"}))


def test_a_task_that_changes_the_planned_model_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """What is trained from scratch is what is matched and reported."""
    told = Path(json.loads(settings["tasks"])[0]).read_text() + "model:\n  family: encoder\n  size: tiny\n"
    (tmp_path / "same.yaml").write_text(told)
    (tmp_path / "other.yaml").write_text(told + "  feed_forward: 64\n  dropout: 0.4\n")
    scratch = {"pretrain": "[]", "pretrain_options": "{}", "skip": "[]", "families": '["decoder"]'}
    assert len(planned(settings, **scratch, tasks=f"[{tmp_path}/same.yaml]").jobs()) == 2
    with pytest.raises(UserError, match="without model.feed_forward, model.dropout; move it to task_options"):
        planned(settings, **scratch, tasks=f"[{tmp_path}/other.yaml]")


def test_the_planned_vocabulary_is_that_of_the_tokenizer(
    settings: dict[str, Any], characters: Tokenizer, tmp_path: Path
) -> None:
    characters.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "meta.json").unlink()
    named = {"pretrain_options": json.dumps({"data.tokenizer": str(tmp_path / "tokenizer")})}
    decoder = planned(settings, **named).candidates["decoder"]
    assert decoder.cost.all_parameters - decoder.cost.parameters == characters.vocab_size * 32
    with pytest.raises(UserError, match="mistyped: no tokenizer.json in it"):
        planned(settings, pretrain_options='{"data.tokenizer": "mistyped"}')
    of_bytes = train(["text"], TokenizerConfig(kind="byte"))
    decoder = planned(settings, pretrain_options='{"data.new_tokenizer.kind": "byte"}').candidates["decoder"]
    assert decoder.cost.all_parameters - decoder.cost.parameters == of_bytes.vocab_size * 32


@pytest.mark.parametrize("damage", ["[]", '{"decoder": []}', '{"decoder": {"asked": 1}}'])
def test_a_damaged_plan_is_one_line(settings: dict[str, Any], damage: str) -> None:
    Path(settings["run_dir"]).mkdir()
    (Path(settings["run_dir"]) / PLAN).write_text(damage)
    with pytest.raises(UserError, match="plan.json: damaged.*delete it"):
        planned(settings)


def test_texts_of_variants_stay_as_they_are(settings: dict[str, Any]) -> None:
    named = {"data.tokenizer": "tokenizers/français", "data.source": '"x"', "trainer.max_steps": 3, "data.x": ["é"]}
    config = build(StudyConfig, [], settings | {"variants": json.dumps({"own": named})})
    assert config.models()["own"].options == named | {"trainer.max_steps": "3", "data.x": r'["\u00e9"]'}


def test_variants_are_matched_started_and_compared_as_they_say(settings: dict[str, Any]) -> None:
    variants = {
        "equal-flops": {"model.family": "encoder-decoder", "match": "flops", "against": ["decoder"]},
        "warm": {"model.family": "encoder-decoder", "start": "encoder"},
        "lstm": {"model.family": "recurrent", "model.preset": "original", "model.alignment": "dot"},
        "gated": {"model.family": "decoder", "model.activation": "swiglu", "match": "parameters"},
    }
    study = planned(settings, size="mini", variants=json.dumps(variants), skip="[]", pretrain_options="{}")
    decoder, equal = study.candidates["decoder"].cost, study.candidates["equal-flops"].cost
    assert abs(equal.flops / decoder.flops - 1) <= 0.01 < abs(equal.parameters / decoder.parameters - 1)
    assert study.candidates["warm"].cost.flops == study.candidates["encoder"].cost.flops
    assert [one.name for one in study.doing("sentiment")] == [*study.config.families, "equal-flops", "lstm", "gated"]
    assert [one.name for one in study.doing("summarization")] == [
        "decoder", "encoder-decoder", "equal-flops", "warm", "lstm", "gated",
    ]  # fmt: skip
    gated, decoder_size = study.candidates["gated"], study.candidates["decoder"].cost.parameters
    assert abs(gated.cost.parameters / decoder_size - 1) <= 0.01, "matched to itself, not to the study's decoder"
    warm = next(cell for cell in study.cells() if cell.candidate.name == "warm")
    assert warm.parent and warm.parent.candidate.name == "encoder" and "pretrain-encoder-1" in warm.given["init_from"]


@pytest.mark.parametrize(
    "mistake, line",
    [
        ({"task_options": '{"optim.lrr": "1"}'}, "unknown key 'optim.lrr'"),
        ({"shard": "3/2"}, "must be like 2/4"),
        ({"skip": '["sentimant"]'}, "'sentimant' is none of the tasks"),
        ({"variants": '{"a b": {}}'}, "must be a new name"),
        ({"variants": '{"warm": {"start": "nobody"}}'}, "names 'nobody', which is no model of this study"),
        ({"variants": '{"rnn": {"model.family": "recurrent", "match": "flops"}}'}, "cannot be matched"),
        ({"variants": '{"x": {"model.width": "wide"}}'}, "model.width must be a whole number or null"),
        ({"variants": '{"x": {"modl.width": 3}}'}, "unknown key 'modl.width'"),
        ({"variants": '{"x": {"model.family": "encoder", "start": "decoder"}}'}, "cannot start from decoder"),
        ({"variants": '{"x": {"start": "decoder", "model.position": "alibi"}}'}, "its start; leave out model.position"),
        ({"variants": '{"x": {"start": "decoder", "match": "flops"}}'}, "its start; leave out its match"),
        ({"variants": '{"x": {"model.layers": 1, "match": "flops"}}'}, "match solves for model.layers; leave one"),
        ({"pretrain": "[]", "pretrain_options": "{}", "match": "flops"}, "match: flops are those of pretraining"),
        ({"task_options": '{"seeds": "2"}'}, "seeds are the study's; leave them out of a task"),
        (
            {"pretrain": "[]", "pretrain_options": "{}", "task_options": '{"init_from": "x/bundle"}'},
            "with init_from all models of the study would be the same one",
        ),
        (
            {
                "families": '["encoder"]',
                "pretrain": "[]",
                "pretrain_options": "{}",
                "skip": '["sentiment", "retrieval"]',
            },
            "tasks: none of these models can do any of them",
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    mistake: dict[str, Any], line: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(settings | mistake)) == 2
    told = capsys.readouterr().err.strip()
    assert line in told and "\n" not in told and not Path(settings["run_dir"]).exists()


def test_too_little_disk_is_one_line(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = study_module.disk_bytes([*planned(settings).pretraining(), *planned(settings).cells()])
    kind = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: kind(1, 1, needed - 1))
    assert cli.main(command(settings)) == 2
    assert "of the disk are free" in capsys.readouterr().err and not Path(settings["run_dir"]).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: kind(1, 1, needed))
    planned(settings)


def test_a_dry_run_times_every_shape_and_leaves_nothing(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(settings | {"dry_run": "true", "skip": '["retrieval"]'})) == 0
    told = capsys.readouterr()
    assert "block parameters" in told.out and "What it takes here" in told.out and "in all" in told.err
    lines = [line.split() for line in told.out.splitlines() if line.startswith(("pretraining", "sentiment", "summar"))]
    assert len(lines) == 3 + 3 + 2
    for job, _, runs, waiting, steps, tokens, *_ in lines:
        assert (runs, waiting) == ("2", "2") and steps == ("4" if job == "pretraining" else "5")
        assert job != "pretraining" or tokens == f"{4 * 8 * 32:,}"
    assert not Path(settings["run_dir"]).exists()


def test_models_that_learn_from_other_rows_are_timed(settings: dict[str, Any], tmp_path: Path) -> None:
    variants = '{"few": {"model.family": "encoder", "data.limit": 40}}'
    study = planned(settings, variants=variants, pretrain="[]", pretrain_options="{}", families='["encoder"]')
    first = {cell.candidate.name: cell for cell in study.jobs()}
    found = {name: calibration.estimate(cell, 400, tmp_path) for name, cell in first.items()}
    assert list(found) == ["encoder", "few"] and len(list(tmp_path.iterdir())) == 2


def test_retrieval_is_timed_by_a_few_texts(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the whole set of documents, whose time would be taken for that of a few queries."""
    embed, embedded = Predictor.embed, list[int]()

    def counted(self: Predictor, texts: list[str]) -> Any:
        embedded.append(len(texts))
        return embed(self, texts)

    monkeypatch.setattr(Predictor, "embed", counted)
    study = planned(settings, skip='["sentiment", "summarization"]', families='["encoder"]')
    calibration.estimate(next(study.cells()), 400, tmp_path)
    assert embedded == [calibration.ANSWERS]


@pytest.mark.parametrize("name", ["encoder-vs-decoder", "attention-worksheet"])
def test_the_studies_of_this_project_can_be_planned(name: str, tmp_path: Path) -> None:
    file = PROJECT / "configs" / "study" / f"{name}.yaml"
    study = plan_study(build(StudyConfig, [file], {"run_dir": str(tmp_path)}))
    assert study.config.seeds == 3 and len([*study.cells()]) > 10


# --- Running it --------------------------------------------------------------------------------------------------


def test_answers_may_hold_ends_of_lines_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "meta.json").write_text("{}")
    rows = [{"answer": "one\u2028two\x85three", "score": 1.0}, {"answer": "four", "score": 0.0}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "val-predictions.jsonl").write_text(text, encoding="utf-8")
    result = result_of(cast(Cell, SimpleNamespace(folder=tmp_path, run=Run(tmp_path))))
    assert result is not None and result["answers"] == rows


def test_a_failed_job_does_not_stop_the_others(
    settings: dict[str, Any], tried: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(settings)) == 2
    told = capsys.readouterr()
    assert [words[0] for words in tried] == ["pretrain"] * 6
    assert told.out.count("failed: ") == 12 and "12 jobs are not done" in told.err
    page = (Path(settings["run_dir"]) / "report.html").read_text()
    assert "pretrain-encoder-1: ended with exit code 1" in page and "No job is finished yet" in page


def test_parts_cover_every_job_once_and_do_not_wait_for_each_other(
    settings: dict[str, Any], tried: list[list[str]]
) -> None:
    """Each machine has what it needs in its own folder; together they are the whole study."""
    done: list[set[str]] = []
    for part in ("1/2", "2/2"):
        study = planned(settings, shard=part, run_dir=f"{settings['run_dir']}-{part[0]}")
        own = {cell.name: cell for cell in (*study.pretraining(), *study.cells()) if study.is_mine(cell)}
        for cell in own.values():
            assert not cell.parent or cell.parent.name in own
            pretend(cell)
        assert study_module.run_study(study) == [] and not tried
        done.append({cell.folder.name for cell in own.values()})
        merged = Path(settings["run_dir"])
        shutil.copytree(study.folder, merged, dirs_exist_ok=True)
    whole = planned(settings)
    assert not done[0] & done[1] and all(abs(len(part) - 6) <= 1 for part in done)
    assert all(cell.run.finished for cell in (*whole.pretraining(), *whole.cells()))


def test_rates_are_chosen_on_validation_with_the_same_budget(settings: dict[str, Any], tried: list[list[str]]) -> None:
    study = planned(settings, learning_rates="[0.001, 0.01, 0.1]", seeds="2")
    for cell in study.pretraining():
        pretend(cell)
    grid = [*study.grid()]
    assert len(grid) == 9 and {cell.seed for cell in grid} == {1}
    best = {"encoder": 0.01, "decoder": 0.1, "encoder-decoder": 0.001}
    for cell in grid[:-1]:
        pretend(cell, 0.9 if cell.rate == best[cell.candidate.name] else 0.5)
    failed = study_module.run_study(study)
    assert [line.partition(":")[0] for line in failed] == [
        "sentiment-encoder-decoder-1-lr0.1", "sentiment-encoder-2-lr0.01", "sentiment-decoder-2-lr0.1",
        "sentiment-encoder-decoder-1", "sentiment-encoder-decoder-2",
    ], "the first seed of a rate is done twice, or a rate is chosen before all were tried"  # fmt: skip
    assert len(study.jobs()) == 6 + 9 + 3, "the first seed of a rate is counted twice"
    pretend(grid[-1])
    for answers in study.folder.glob("*/val-predictions.jsonl"):
        answers.unlink()  # which choosing a rate needs not read
    assert {cell.candidate.name: cell.rate for cell in study.cells()} == best
    assert len(study.jobs()) == 6 + 9 + 3


def test_a_rate_that_diverges_is_passed_over(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    study = planned(settings, learning_rates="[0.001, 0.1]", seeds="2", families='["encoder"]')
    for cell in (*study.pretraining(), *(cell for cell in study.grid() if cell.rate == 0.001)):
        pretend(cell)
    done: list[str] = []

    def run(words: list[str], prepared: bool) -> int:
        folder = Path(words[words.index("--run_dir") + 1])
        done.append(folder.name.rpartition("-")[0])
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"step": 10, "train/skipped_steps": 9}\n')
        if len(done) > 1:
            Run(folder).diverged.write_text("no finite gradient\n")
        return 2

    monkeypatch.setattr(study_module, "run_command", run)
    assert len(study_module.run_study(study)) == 3, "a mistake that can be mended counts as a rate that was tried"
    failed = study_module.run_study(study)
    assert [cell.rate for cell in study.cells()] == [0.001, 0.001]
    assert done == [
        "sentiment-encoder-1-lr0.1", "sentiment-encoder-1-lr0.1", "sentiment-encoder-2-lr0.001",
    ] and [line.partition(":")[0] for line in failed] == ["sentiment-encoder-2-lr0.001"]  # fmt: skip
    study_module.run_study(study)
    assert done[3:] == ["sentiment-encoder-2-lr0.001"], "a rate that diverged is tried again"


@pytest.mark.slow
def test_what_stops_a_study_stops_its_job_in_good_order(settings: dict[str, Any]) -> None:
    """A signal is passed on once and the job saves; where the study is killed, its job does not go on without it."""
    long = settings | {"pretrain_options": '{"trainer.max_steps": "100000"}', "families": '["decoder"]'}
    before: list[int] = []
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen([sys.executable, "-m", "pipeline", *command(long)], start_new_session=True)
        wait_until(lambda: any(is_locked(run) for run in runs(settings)))
        before.append(last_steps(settings))
        wait_until(lambda: last_steps(settings) > before[-1])
        os.killpg(process.pid, number)  # as the keyboard does it: all processes of the terminal
        assert process.wait(60) == code
        wait_until(lambda: not any(is_locked(run) for run in runs(settings)))
        assert list(Path(settings["run_dir"]).glob("*/checkpoints/step-*.pt"))


def runs(settings: dict[str, Any]) -> list[Run]:
    return [Run(path.parent) for path in Path(settings["run_dir"]).glob("*/metrics.jsonl")]


def last_steps(settings: dict[str, Any]) -> int:
    return max((row["step"] for run in runs(settings) for row in run.rows()), default=0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
