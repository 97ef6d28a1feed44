"""Fine-tuning: every family learns what it can, says what it cannot, and predicts the same however it is asked."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import cli
from pipeline.bundle import Bundle, load_bundle, make_model
from pipeline.config import AnswerConfig, GenerationConfig
from pipeline.data.config import TaskConfig, TaskDataConfig, TokenizerConfig
from pipeline.data.datamodule import Share, TokenSteps
from pipeline.data.objectives import IGNORED
from pipeline.data.rows import made_up, read_task
from pipeline.data.tasks import Encoder, Row
from pipeline.errors import UserError
from pipeline.evaluation import predicting
from pipeline.inference import load
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.generation import generate
from pipeline.model.heads import pooled
from pipeline.model.transformer import Transformer
from pipeline.tokenizer import train
from pipeline.training import checkpoint
from pipeline.training.pretraining import start_bundle
from pipeline.training.taskjob import warm_start
from tests.novels import novel
from tests.training.jobs import arguments, finish, last_step, rows, signal_when, start, write_novels

GOOD, BAD = ["lovely", "splendid", "bright"], ["dreadful", "dull", "awful"]
FAMILIES = ("encoder", "decoder", "encoder-decoder", "recurrent")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def write_rows(path: Path, table: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of different lengths with one telling word in each."""
    draw = random.Random(seed)
    table = []
    for _ in range(count):
        label = draw.randrange(2)
        words = [draw.choice("the a film plot was of with actor scene".split()) for _ in range(draw.randrange(3, 12))]
        words.insert(draw.randrange(len(words)), draw.choice((BAD, GOOD)[label]))
        table.append({"text": " ".join(words), "label": label})
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_rows(folder / "train.jsonl", reviews(240, 1))
    write_rows(folder / "dev.jsonl", reviews(60, 2))
    return folder


def words(folder: Path, run: Path, task: str = "sentiment", **more: Any) -> list[str]:
    options: dict[str, Any] = {
        "task.name": task,
        "data.train": folder / "train.jsonl",
        "data.validation": folder / "dev.jsonl",
        "data.new_tokenizer.vocab_size": 420,
        "data.sequence_length": 24,
        "data.batch_size": 16,
        "model.size": "tiny",
        "model.width": 32,
        "optim.lr": 3e-3,
        "optim.warmup_steps": 5,
        "trainer.max_epochs": 4,
        "trainer.validate_every": 20,
        "trainer.save_every": 20,
        "trainer.accelerator": "cpu",
        "tracking.mode": "disabled",
        "run_dir": run,
    } | {name.replace("__", "."): value for name, value in more.items()}
    if task in ("reversal", "case"):
        options = {name: value for name, value in options.items() if name not in ("data.train", "data.validation")}
    return ["finetune", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_to_classify(family: str, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main(words(folder, run, model__family=family, model__preset="original", model__dropout=0)) == 0
    meta = json.loads((run / "bundle" / "meta.json").read_text())
    assert meta["labels"] == ["0", "1"] and meta["metrics"]["val/accuracy"] > 0.9


@pytest.fixture(scope="module")
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("classifier") / "run"
    assert cli.main(words(folder, run, model__family="decoder", trainer__max_epochs=2)) == 0
    return run / "bundle"


def test_predictions_depend_on_nothing_but_the_row(classifier: Path, folder: Path, tmp_path: Path) -> None:
    """Not on the batch size, nor on the order, nor on what stands beside it."""
    table = reviews(40, 3)
    for name, order in (("forward", table), ("backward", table[::-1])):
        write_rows(tmp_path / f"{name}.jsonl", order)
    found = []
    for name, size in (("forward", 32), ("forward", 1), ("backward", 7)):
        output = tmp_path / f"{name}-{size}.out.jsonl"
        command = [
            "predict",
            classifier,
            "--input",
            tmp_path / f"{name}.jsonl",
            "--output",
            output,
            "--batch_size",
            size,
        ]
        assert cli.main([str(word) for word in command]) == 0
        results = [json.loads(line) for line in output.read_text().splitlines()]
        found.append({row["source"]: (row["label"], row["chances"]["1"]) for row in results})
        assert len(results) == 40
    for other in found[1:]:
        assert all(found[0][text][0] == other[text][0] for text in other)
        assert max(abs(found[0][text][1] - other[text][1]) for text in other) < 2e-6


def test_a_bundle_of_any_checkpoint_does_the_task(
    classifier: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of that step and what the bundle at the end knows, but its measurements; the run is not touched."""
    run = classifier.parent
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert cli.main(["bundle", str(run), "--step", "20", "--output", str(tmp_path / "early")]) == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    early, final = load_bundle(tmp_path / "early"), load_bundle(classifier)
    saved = {one.step: one for one in checkpoint.found(run)}
    weights = early.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved[20].read()["model"].items())
    for key in ("stage", "task", "labels", "pooling", "source_length", "rows_fingerprint", "run"):
        assert early.meta[key] == final.meta[key], key
    assert early.meta["step"] == 20 and early.meta["metrics"]["val/accuracy"] == -(saved[20].score or 0)
    rows = ["--data", str(folder / "dev.jsonl"), "--json", str(tmp_path / "scores")]
    assert cli.main(["evaluate", str(tmp_path / "early"), *rows]) == 0
    accuracy = json.loads((tmp_path / "scores").read_text())["metrics"]["accuracy"]
    assert accuracy == pytest.approx(early.meta["metrics"]["val/accuracy"])
    capsys.readouterr()
    assert cli.main(["bundle", str(run), "--step", "7"]) == 2
    assert "no checkpoint of step 7; there are" in capsys.readouterr().err


def test_an_interrupted_prediction_goes_on(classifier: Path, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", reviews(12, 4)), tmp_path / "out.jsonl"
    command = ["predict", str(classifier), "--input", str(source), "--output", str(output)]
    assert cli.main(command) == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-30])
    assert cli.main(command) == 0
    assert output.read_bytes() == whole
    assert cli.main(["predict", str(classifier), "another text", "--output", str(output)]) == 2
    assert output.read_bytes() == whole


def test_evaluating_agrees_with_scikit_learn(classifier: Path, folder: Path, tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    scores = tmp_path / "scores.json"
    assert cli.main(["evaluate", str(classifier), "--data", str(folder / "dev.jsonl"), "--json", str(scores)]) == 0
    table = reviews(60, 2)
    chances = load(classifier).classify([row["text"] for row in table])
    guesses, labels = [int(one["1"] > 0.5) for one in chances], [row["label"] for row in table]
    told = json.loads(scores.read_text())
    assert told["metrics"]["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert told["metrics"]["macro_f1"] == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert told["bundle"] == str(classifier) and told["data"] == str(folder / "dev.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_short_strings_are_reversed(family: str, tmp_path: Path) -> None:
    more = {"task__longest": 6, "task__examples": 3000, "data__new_tokenizer__kind": "character"}
    run = tmp_path / "run"
    settings = [
        *words(tmp_path, run, "reversal", model__family=family, generation__max_new_tokens=8, **more),
        "--data.new_tokenizer.min_frequency", "1", "--trainer.max_epochs", "14", "--trainer.validate_every", "400",
        "--data.batch_size", "32", "--model.width", "64",
    ]  # fmt: skip
    assert cli.main(settings) == 0
    assert json.loads((run / "bundle" / "meta.json").read_text())["metrics"]["test/exact_match"] > 0.8
    assert load(run / "bundle").translate(["abc"]) == load(run / "bundle").translate(["abc", "dddd"])[:1]


def test_fine_tuning_is_resumed_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"model__family": "encoder", "model__dropout": 0.1, "trainer__save_every": 7}
    assert finish(words(folder, tmp_path / "whole", **more), tmp_path / "out.txt") == 0
    run = tmp_path / "killed"
    signal_when(start(words(folder, run, **more), tmp_path / "out.txt"), lambda: last_step(run) >= 20)
    assert finish(["finetune", "--resume", str(run)], tmp_path / "out.txt") == 0, (tmp_path / "out.txt").read_text()
    weights = [(path / "bundle" / "model.safetensors").read_bytes() for path in (tmp_path / "whole", run)]
    assert weights[0] == weights[1] and rows(tmp_path / "whole") == rows(run)


def test_an_encoder_is_warm_started_with_fresh_cross_attention_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    novels = write_novels(tmp_path / "novels")
    for family in ("encoder", "decoder"):
        more = {"trainer__max_steps": 2, "data__new_tokenizer__tags": "[<de>]"}
        assert cli.main(arguments(novels, tmp_path / family, family, **more)) == 0
    first, second = (load_bundle(tmp_path / family / "bundle") for family in ("encoder", "decoder"))
    for other, side in ((first, "encoder"), (second, "decoder")):
        model = warm_start(first, other)
        state, own, theirs = model.state_dict(), first.model.state_dict(), other.model.state_dict()
        assert any(".cross." in name for name in state)
        for name, tensor in state.items():
            if name.startswith("decoder.") and ".cross." not in name:
                assert torch.equal(tensor, theirs[name.replace("decoder.", f"{side}.", 1)]), name
            elif not name.startswith("decoder."):
                assert torch.equal(tensor, own[name]), name
    table = [{"en": f"the {word}", "de": f"das {word}"} for word in "sea garden letter storm boat".split()] * 4
    write_rows(tmp_path / "train.jsonl", table)
    write_rows(tmp_path / "dev.jsonl", table[:5])
    run = tmp_path / "translation"
    more = {"init_from": tmp_path / "encoder" / "bundle", "task__tag": "<de>", "generation__max_new_tokens": 6}
    assert cli.main(words(tmp_path, run, "translation", trainer__max_epochs=1, **more)) == 0
    assert load_bundle(run / "bundle").model.architecture.family == "encoder-decoder"
    written: list[GenerationConfig] = []

    def noted(model: Transformer, prompts: Any, settings: GenerationConfig, **more: Any) -> Any:
        written.append(settings)
        return generate(model, prompts, settings, **more)

    monkeypatch.setattr(predicting, "generate", noted)
    data = str(tmp_path / "dev.jsonl")
    assert cli.main(["evaluate", str(run / "bundle"), "--data", data, "--generation.beams", "3"]) == 0
    assert set(written) == {GenerationConfig(beams=3, max_new_tokens=6)}


@pytest.mark.parametrize("settings", [{"attention": "low_rank"}, {"preset": "t5"}], ids=str)
def test_an_encoder_that_only_encoders_are_like_is_warm_started(settings: dict[str, Any]) -> None:
    """Low-rank attention mixes all positions, and T5's buckets look both ways: a decoder has neither."""
    torch.manual_seed(1)
    model = make_model(resolve(ModelConfig(family="encoder", size="tiny", **settings)), 400)
    bundle = Bundle(model, train([novel(1)], TokenizerConfig(vocab_size=400)))
    made, given = warm_start(bundle, bundle).state_dict(), model.state_dict()
    name = "blocks.1.attention.layer.query.weight"
    assert torch.equal(made[f"decoder.{name}"], given[f"encoder.{name}"])
    own = [name for name in made if name.startswith("decoder.positions.")]
    assert own == [] or not torch.equal(made[own[0]], given[own[0].replace("decoder", "encoder")])


def test_what_is_not_named_is_written_as_in_training() -> None:
    trained = GenerationConfig(max_new_tokens=20, beams=4, no_repeat_ngram=3)
    assert AnswerConfig().over(trained) == trained
    assert AnswerConfig(beams=1, length_penalty=0.5).over(trained) == replace(trained, beams=1, length_penalty=0.5)


# --- Rows and examples ---


def tokenizer_and_encoder(folder: Path, family: str, task: str = "sentiment") -> Encoder:
    from pipeline.data.config import TokenizerConfig
    from pipeline.tokenizer import train

    tokenizer = train((row["text"] for row in reviews(100, 1)), TokenizerConfig(vocab_size=420))
    settings = resolve(ModelConfig(family=family, size="tiny"))  # type: ignore[arg-type]
    return Encoder(TaskConfig(name=task), settings, tokenizer, ["0", "1"], 24, 12)  # type: ignore[arg-type]


def test_a_decoder_reads_source_separator_and_target_with_loss_on_the_target(folder: Path) -> None:
    encoder = tokenizer_and_encoder(folder, "decoder", "translation")
    tokenizer = encoder.tokenizer
    example = encoder.example(Row("the film", "a plot"))
    source, target = tokenizer.encode("the film"), tokenizer.encode("a plot")
    begin, separator, end = (tokenizer.id("begin"), tokenizer.id("separator"), tokenizer.id("end"))
    assert example.inputs is not None
    assert example.inputs.tolist() == [begin, *source, separator, *target]
    assert example.targets.tolist() == [IGNORED] * (len(source) + 1) + [*target, end]
    long = encoder.example(Row("film " * 100, "plot " * 100))
    assert long.inputs is not None and len(long.inputs) == 24 + 11 + 2 and encoder.cut == {"source": 1, "target": 1}


def test_pooling_never_sees_padding() -> None:
    states = torch.arange(24.0).reshape(2, 4, 3)
    real = torch.tensor([[True, True, False, False], [True, True, True, True]])
    wild = states.masked_fill(~real[..., None], 1e9)
    for pooling in ("mean", "class", "last"):
        assert torch.equal(pooled(wild, real, pooling)[0], pooled(states[:1, :2], None, pooling)[0])
    assert torch.equal(pooled(wild, real, "last")[0], states[0, 1])


def test_batches_by_tokens_hold_every_row_once_an_epoch() -> None:
    parts = np.random.default_rng(0).integers(3, 30, (500, 2))
    steps = TokenSteps(parts, batch_tokens=400, seed=1)
    for epoch in (0, 1):
        batches = [steps.keys(epoch * steps.per_epoch + place) for place in range(steps.per_epoch)]
        assert sorted(key[2] for batch in batches for key in batch) == list(range(500))
        padded = [len(batch) * parts[[key[2] for key in batch]].max(0).sum() for batch in batches]
        assert sorted(padded)[1] > 200 and max(padded) <= 400  # what is left may be one small batch
        shares = [Share(rank, 2, 0).parts(batches[0], 0)[0] for rank in (0, 1)]
        assert sorted(shares[0] + shares[1]) == sorted(batches[0])
    assert steps.keys(0) != [(0, 0, key[2]) for key in steps.keys(steps.per_epoch)]
    assert all(len(TokenSteps(np.array([[1, 99], [99, 1]]), 200, 1).keys(place)) == 1 for place in (0, 1))


def test_batches_by_tokens_are_of_other_rows_in_every_epoch() -> None:
    parts = np.random.default_rng(0).integers(5, 30, (20_000, 2))
    steps = TokenSteps(parts, batch_tokens=1000, seed=1)
    first, second = (
        {frozenset(key[2] for key in steps.keys(epoch * steps.per_epoch + place)) for place in range(steps.per_epoch)}
        for epoch in (0, 1)
    )
    mates = {row: batch for batch in first for row in batch}
    again = [len(batch & mates[row]) - 1 for batch in second for row in batch]
    assert sum(again) < 0.4 * sum(len(batch) - 1 for batch in second for _ in batch)


def test_batches_by_tokens_hold_little_padding_on_either_side() -> None:
    """Rows of one total whose sources differ would be padded twice."""
    parts = np.random.default_rng(0).integers(5, 30, (20_000, 2))
    steps = TokenSteps(parts, batch_tokens=1000, seed=1)
    batches = [parts[[key[2] for key in steps.keys(place)]] for place in range(steps.per_epoch)]
    computed = sum(len(batch) * batch.max(0).sum() for batch in batches)
    assert parts.sum() < computed < 1.05 * parts.sum()


def test_made_up_rows_are_right_and_in_one_split_only() -> None:
    task = TaskConfig(name="case", examples=200, longest=8)
    found = made_up(task, 1)
    for row in found.train:
        letters = row.source[3:]
        assert row.target == (letters.upper() if row.source.startswith("<U>") else letters.lower())
    assert not {row.source for row in found.train} & {row.source for row in (*found.validation, *found.test)}


def test_a_limit_draws_by_the_seed(folder: Path) -> None:
    task, data = TaskConfig(name="sentiment"), TaskDataConfig(
        train=str(folder / "train.jsonl"), validation=str(folder / "dev.jsonl"), limit=20
    )  # fmt: skip
    one, again, other = (read_task(task, data, seed).train for seed in (1, 1, 2))
    assert one == again != other and len(one) == 20


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"review": "x", "label": 1}, "no column 'text'; it has review, label"),
    "null text": ({"text": None, "label": 1}, "column 'text' holds None"),
    "number": ({"text": 3, "label": 1}, "column 'text' holds 3"),
    "empty": ({"text": "  ", "label": 1}, "column 'text' is empty"),
    "no label": ({"text": "x", "label": None}, "column 'label' holds None"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_one_line_with_its_number_or_is_skipped(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, message = BAD_ROWS[name]
    write_rows(tmp_path / "train.jsonl", [*reviews(30, 1), row])
    write_rows(tmp_path / "dev.jsonl", reviews(10, 2))
    assert cli.main(words(tmp_path, tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert f"train.jsonl row 31: {message}" in error and "Traceback" not in error
    assert cli.main(words(tmp_path, tmp_path / "run2", data__on_error="skip", trainer__max_epochs=1)) == 0
    assert "1 of 31 rows skipped" in capsys.readouterr().err


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one class": ({"train": [{"text": "x", "label": 1}] * 20}, {}, "all rows have the label 1"),
    "unknown label": (
        {"dev": [{"text": "x", "label": 7}]},
        {},
        "dev.jsonl row 1: label '7' is not one",
    ),
    "no file": ({}, {"data__train": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
    "no bundle": ({}, {"init_from": "nowhere"}, "nowhere"),
    "encoder asked to write": ({}, {"task__name": "reversal"}, "a model of family encoder cannot do reversal"),
    "too long": (
        {},
        {"model__position": "learned", "model__max_positions": 16},
        "need 26 positions, but the model has 16",
    ),
    "too long to align": (
        {},
        {"model__family": "recurrent", "model__alignment": "location", "model__max_positions": 16},
        "need 26 positions, but the model has 16",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, settings, message = MISTAKES[name]
    for split, size in (("train", 30), ("dev", 10)):
        write_rows(tmp_path / f"{split}.jsonl", tables.get(split, reviews(size, 1)))
    assert cli.main(words(tmp_path, tmp_path / "run", **settings)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_rows_of_an_unknown_class_can_be_skipped(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [{"text": "x", "label": 7}, *reviews(20, 5)]
    data = str(write_rows(tmp_path / "rows.jsonl", table))
    assert cli.main(["evaluate", str(classifier), "--data", data]) == 2
    assert "rows.jsonl row 1: label '7' is not one" in capsys.readouterr().err
    assert cli.main(["evaluate", str(classifier), "--data", data, "--on_error", "skip"]) == 0
    assert "rows.jsonl: 1 of 21 rows skipped: their labels" in capsys.readouterr().err


def test_a_pretrained_bundle_says_that_it_does_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    novels = write_novels(tmp_path / "novels")
    assert cli.main(arguments(novels, tmp_path / "run", "encoder", trainer__max_steps=1)) == 0
    bundle = str(tmp_path / "run" / "bundle")
    assert cli.main(["predict", bundle, "text"]) == 2
    assert "not fine-tuned for a task" in capsys.readouterr().err
    assert cli.main(["generate", bundle, "text"]) == 2
    assert "an encoder cannot write" in capsys.readouterr().err


def test_a_classifier_is_not_exported_without_its_head(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(classifier), str(tmp_path / "exported")]) == 2
    assert "a fine-tuned classifier cannot be exported" in capsys.readouterr().err


def test_a_bundle_of_another_task_can_be_the_start(classifier: Path, folder: Path, tmp_path: Path) -> None:
    """The head of the first task is left behind, and so is what its record says of it."""
    run = tmp_path / "run"
    more: dict[str, Any] = {"task__examples": 40, "task__longest": 8, "trainer__max_steps": 1, "init_from": classifier}
    assert cli.main(words(folder, run, "reversal", generation__max_new_tokens=4, **more)) == 0
    bundle = load_bundle(run / "bundle")
    assert bundle.model.classifier is None and bundle.meta["labels"] == [] and bundle.meta["task"]["name"] == "reversal"


def test_dropout_can_be_named_anew_for_a_bundle(classifier: Path) -> None:
    plain = start_bundle(str(classifier), ModelConfig()).model
    model = start_bundle(str(classifier), ModelConfig(dropout=0.3)).model
    assert isinstance(plain, Transformer) and isinstance(model, Transformer)
    ids = torch.randint(50, 300, (2, 9))
    states = [one.eval().decode(ids) for one in (plain, model)]
    assert states[0].equal(states[1])
    assert plain.train().decode(ids).equal(states[0])
    assert not model.train().decode(ids).equal(states[0])
    with pytest.raises(UserError, match="model.dropout: 2 must be from 0 up to 1"):
        start_bundle(str(classifier), ModelConfig(dropout=2))


def test_a_classifier_of_bert_resumes(folder: Path, tmp_path: Path) -> None:
    """Its language head has weights that classification never uses."""
    more: dict[str, Any] = {"model__family": "encoder", "model__preset": "bert", "trainer__max_epochs": 2}
    run = tmp_path / "run"
    signal_when(start(words(folder, run, **more), tmp_path / "out.txt"), lambda: last_step(run) >= 20)
    assert finish(["finetune", "--resume", str(run)], tmp_path / "out.txt") == 0, (tmp_path / "out.txt").read_text()


def test_answers_that_would_be_cut_off_and_checkpoints_that_will_be_missing_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"data__target_length": 80, "trainer__max_steps": 3, "average": 4, "trainer__save_every": 2}
    made = words(tmp_path, tmp_path / "run", "reversal", **more, task__examples=60, task__longest=8)
    assert cli.main([*made, "--model.family", "decoder", "--trainer.max_epochs", "null"]) == 0
    told = capsys.readouterr().err
    assert "answers end after generation.max_new_tokens, 64, though data.target_length is 80; raise it" in told
    assert "average: of 4 checkpoints there will be 2; lower trainer.save_every" in told


def test_changed_rows_are_noticed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text((folder / f"{name}.jsonl").read_text())
    run, output = tmp_path / "run", tmp_path / "out.txt"
    signal_when(start(words(tmp_path, run), output), lambda: last_step(run) >= 20)
    write_rows(tmp_path / "train.jsonl", reviews(240, 9))
    assert cli.main(["finetune", "--resume", str(run)]) == 2
    assert "was started with other rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["predict", "BUNDLE", "x", "--batch_size", "0"],
        ["evaluate", "BUNDLE", "--data", "nowhere.jsonl"],
        ["evaluate", "BUNDLE", "--data", "nowhere.jsonl", "--generation.beams", "0"],
        ["evaluate", "BUNDLE", "--data", "nowhere.jsonl", "--generation.temperature", "1"],
        ["bundle", "RUN", "--step", "7"],
    ],
)
def test_other_mistakes_are_one_line(wrong: list[str], classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"BUNDLE": str(classifier), "RUN": str(classifier.parent)}
    assert cli.main([places.get(word, word) for word in wrong]) == 2
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "Traceback" not in told and "<class" not in told
