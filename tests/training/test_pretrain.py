"""Pretraining through the command line: every family and objective, what it hands on, and every mistake in one line."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import cli
from pipeline.bundle import load_bundle, make_model
from pipeline.configuration import build
from pipeline.errors import UserError
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.decoding import Decoding
from pipeline.tokenizer import Tokenizer
from pipeline.training import checkpoint
from pipeline.training.config import PretrainConfig
from pipeline.training.fit import one_line_memory_errors
from pipeline.training.module import Retriever
from pipeline.training.run import Run as OnDisk
from pipeline.training.run import opened
from tests.training.jobs import arguments, rows, write_novels

torch.set_num_threads(1)

QUICK: dict[str, Any] = {
    "tracking__samples_every": 0,
    "model__dropout": 0.0,
    "optim__lr": 5e-3,
    "optim__warmup_steps": 2,
    "trainer__max_steps": 20,
    "trainer__log_every": 1,
    "trainer__validate_every": 5,
    "trainer__save_every": 10,
}
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels", count=3, paragraphs=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that was trained on other text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    others = write_novels(folder / "others", count=6, paragraphs=4)
    words = ["tokenizer", "train", "--corpus", str(others), "--vocab_size", "400", "--output", str(folder / "trained")]
    assert cli.main([*words, "--workers", "1"]) == 0
    return folder / "trained"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(novels: Path, tokenizer: Path, folder: Path) -> Run:
    """Runs by their name, each trained once."""

    def run(name: str, **more: Any) -> Path:
        path = folder / name
        if not path.exists():
            assert cli.main(arguments(novels, path, **QUICK | {"data__tokenizer": tokenizer} | more)) == 0
        return path

    return run


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_bundle(run / "bundle").model.state_dict()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def values(run: Path, key: str) -> list[float]:
    return [row[key] for row in rows(run) if key in row]


# --- What can be trained -----------------------------------------------------------------------------------------

OBJECTIVES: list[tuple[str, str, dict[str, Any]]] = [
    ("encoder", "masked", {}),
    ("encoder", "masked", {"objective__unit": "word", "objective__rate": 0.3, "objective__final_rate": 0.15}),
    ("decoder", "causal", {}),
    ("decoder", "prefix", {}),
    ("decoder", "masked", {}),
    ("decoder", "hybrid", {}),
    ("encoder-decoder", "span", {}),
    ("encoder-decoder", "prefix", {}),
    ("recurrent", "causal", {}),
    ("decoder", "scheduled", {"objective__schedule": json.dumps({"causal": 0.25, "masked": 0.75})}),
]


@pytest.mark.parametrize(("family", "objective", "more"), OBJECTIVES)
def test_every_family_learns_by_every_objective(
    family: str, objective: str, more: dict[str, Any], trained: Run
) -> None:
    """The pinned validation loss falls from validation to validation, and by much in all."""
    settings = more if objective == "scheduled" else {"objective__name": objective} | more
    run = trained(f"{family}-{objective}-{len(more)}", family=family, **settings)
    losses = values(run, "val/loss")
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.15
    assert ("val/bits_per_byte" in rows(run)[-1]) == (objective in ("causal", "prefix", "hybrid"))
    if objective == "hybrid":
        masked = values(run, "val/masked_loss")
        assert masked[-1] < masked[0] - 0.15
    named = load_bundle(run / "bundle").meta["objective"]
    assert named == (["causal", "masked"] if objective == "scheduled" else [objective])


def test_a_decoder_goes_on_from_a_prompt_as_it_has_learnt_to_read_one(trained: Run) -> None:
    """Both ways after prefixes, else causally: in writing, for tasks, and in what is trained further."""
    reads = {}
    for objective in ("prefix", "causal"):
        bundle = load_bundle(trained(f"decoder-{objective}-0", objective__name=objective) / "bundle")
        ids = torch.tensor([bundle.tokenizer.encode("It was a dark night, and the")])
        reads[objective] = bundle.model.architecture.prefix_attention
        told = Decoding(bundle.model, None).prompt(ids, None, room=1)
        both_ways, causal = (
            bundle.model.logits(bundle.model.decode(ids, prefix_B=prefix)[:, -1])
            for prefix in (torch.tensor([ids.shape[1]]), None)
        )
        expected, other = (both_ways, causal) if objective == "prefix" else (causal, both_ways)
        torch.testing.assert_close(told, expected)
        assert not torch.allclose(told, other, atol=1e-3)
    assert reads == {"prefix": "bidirectional", "causal": "causal"}
    start = trained("decoder-prefix-0", objective__name="prefix") / "bundle"
    further = trained("prefix-then-causal", objective__name="causal", init_from=start, data__tokenizer="null")
    assert load_bundle(further / "bundle").model.architecture.prefix_attention == "causal"


def test_settings_that_a_bundle_overrules_are_named(
    trained: Run, novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = trained("decoder-causal-0", objective__name="causal") / "bundle"
    capsys.readouterr()
    more = {"init_from": start, "trainer__max_steps": 1, "model__position": "alibi", "model__dropout": 0.1}
    assert cli.main(arguments(novels, tmp_path / "run", **QUICK | more)) == 0
    told = capsys.readouterr().err
    assert f"warning: {start} keeps its own model: model.position of the settings have no effect" in told


def test_a_scheduled_objective_changes_when_it_should(trained: Run) -> None:
    """A quarter causal, with loss at every token; then masked, with loss at every seventh."""
    schedule = {"objective__schedule": json.dumps({"causal": 0.25, "masked": 0.75})}
    run = trained("decoder-scheduled-1", family="decoder", **schedule)
    counts = [row for row in rows(run) if "train/loss" in row]
    shares = [row["tokens_loss"] / row["tokens"] for row in counts]
    assert shares[:5] == [1.0] * 5
    later = (counts[-1]["tokens_loss"] - counts[4]["tokens_loss"]) / (counts[-1]["tokens"] - counts[4]["tokens"])
    assert 0.1 < later < 0.2


def test_muon_learns_and_resumes_to_the_last_bit(trained: Run, novels: Path, tokenizer: Path, folder: Path) -> None:
    """The second run breaks off right after its first checkpoint and goes on from there."""
    muon = {"optim__name": "muon", "optim__lr": 2e-3, "family": "decoder"}
    whole = trained("muon", **muon)
    assert values(whole, "val/loss")[-1] < values(whole, "val/loss")[0] - 0.15
    words = arguments(novels, folder / "muon-broken", **QUICK | {"data__tokenizer": tokenizer} | muon)

    def stop(*_: object) -> None:
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "prune", stop)
        with pytest.raises(RuntimeError, match="power cut"):
            cli.main(words)
    assert [saved.step for saved in checkpoint.found(folder / "muon-broken")] == [5]
    assert cli.main(words) == 0
    assert distance(weights_of(whole), weights_of(folder / "muon-broken")) == 0
    assert rows(whole) == rows(folder / "muon-broken")


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_recomputing_changes_nothing(family: str, trained: Run) -> None:
    """With dropout, whose masks must be the same the second time."""
    dropout = {"family": family, "model__dropout": 0.2, "trainer__max_steps": 8}
    kept, again = (trained(f"{family}-recompute-{on}", trainer__recompute=on, **dropout) for on in (False, True))
    assert distance(weights_of(kept), weights_of(again)) < 1e-6


def test_mixed_precision_learns_and_keeps_whole_weights(trained: Run) -> None:
    """At a rate at which rounding stays small: a bold one makes two runs of any precision drift apart."""
    calm = {"objective__name": "causal", "optim__lr": 2e-3}
    run, exact = trained("bf16", trainer__precision="bf16-mixed", **calm), trained("whole", **calm)
    losses, exact_losses = values(run, "val/loss"), values(exact, "val/loss")
    assert losses[-1] < losses[0] - 0.15 and losses == pytest.approx(exact_losses, abs=0.05)
    assert losses != exact_losses, "nothing was rounded"
    assert {tensor.dtype for tensor in weights_of(run).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_a_compiled_model_learns_the_same(family: str, trained: Run) -> None:
    """And its bundle has the names that every bundle has."""
    steps = {"family": family, "trainer__max_steps": 6}
    plain, compiled = (trained(f"{family}-compile-{on}", trainer__compile=on, **steps) for on in (False, True))
    assert distance(weights_of(plain), weights_of(compiled)) < 1e-4


# --- What is handed on -------------------------------------------------------------------------------------------


def test_a_bundle_says_where_it_comes_from(trained: Run, tokenizer: Path) -> None:
    run = trained("decoder-causal-0", objective__name="causal")
    bundle, prepared = load_bundle(run / "bundle"), json.loads((run / "prepared.json").read_text())
    own = Tokenizer.load(tokenizer)
    assert bundle.tokenizer.fingerprint == own.fingerprint
    assert bundle.meta["tokenizer_fingerprint"] == own.fingerprint
    assert bundle.meta["corpus_fingerprint"] == prepared["corpus"] != own.meta["corpus_fingerprint"]
    assert bundle.meta["step"] == 20 and bundle.meta["stage"] == "pretrain" and bundle.meta["parent"] is None
    assert bundle.meta["metrics"]["val/loss"] == values(run, "val/loss")[-1]
    assert not bundle.model.training


def test_a_bundle_of_any_checkpoint(trained: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weights of that step, and the same record of where they come from as at the end."""
    run = trained("decoder-causal-0", objective__name="causal")
    capsys.readouterr()
    assert cli.main(["bundle", str(run), "--step", "10"]) == 0
    early = Path(capsys.readouterr().out.strip())
    assert early.parent == run
    saved = {found.step: found for found in checkpoint.found(run)}
    assert distance(load_bundle(early).model.state_dict(), saved[10].read()["model"]) == 0
    assert cli.main(["bundle", str(run), "--output", str(tmp_path / "newest")]) == 0
    newest, final = load_bundle(tmp_path / "newest"), load_bundle(run / "bundle")
    assert distance(newest.model.state_dict(), final.model.state_dict()) == 0
    for key in ("stage", "step", "corpus_fingerprint", "tokenizer_fingerprint", "objective", "parent", "run"):
        assert newest.meta.get(key) == final.meta[key], key
    assert load_bundle(early).meta["step"] == 10
    capsys.readouterr()
    assert cli.main(["bundle", str(run), "--step", "11"]) == 2
    assert "there are 10, 20" in one_line(capsys)
    assert cli.main(["bundle", str(tmp_path)]) == 2
    assert "no checkpoint" in one_line(capsys)


def test_init_from_goes_on_from_a_bundle(trained: Run, novels: Path, folder: Path) -> None:
    """It begins where the parent ended, with the parent's tokenizer and shape, whatever the model's size says."""
    parent = trained("decoder-causal-0", objective__name="causal")
    child = trained("child", init_from=parent / "bundle", data__tokenizer=parent / "bundle", optim__lr=1e-4)
    assert values(child, "val/loss")[0] == pytest.approx(values(parent, "val/loss")[-1], abs=0.1)
    assert values(child, "val/loss")[-1] < values(parent, "val/loss")[0] - 0.15
    one, other = load_bundle(parent / "bundle"), load_bundle(child / "bundle")
    assert other.meta["parent"] == str(parent / "bundle") and other.meta["step"] == 20
    assert other.tokenizer.fingerprint == one.tokenizer.fingerprint
    assert other.model.architecture == one.model.architecture
    assert 0 < distance(one.model.state_dict(), other.model.state_dict()) < 0.05


# --- Runs --------------------------------------------------------------------------------------------------------


def without_folder(words: list[str]) -> list[str]:
    place = words.index("--run_dir")
    return words[:place] + words[place + 2 :]


def test_the_same_command_twice_is_one_run(
    novels: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder below runs/ is named by the settings; other settings make another."""
    monkeypatch.chdir(tmp_path)
    words = without_folder(arguments(novels, folder / "unused", **QUICK | {"trainer__max_steps": 2}))
    capsys.readouterr()
    outputs = []
    for _ in range(2):
        assert cli.main(words) == 0
        captured = capsys.readouterr()
        outputs.append((captured.out.strip().splitlines()[-1], "finished before" in captured.err))
    assert [finished for _, finished in outputs] == [False, True]
    assert outputs[0][0] == outputs[1][0] and len(list((tmp_path / "runs").iterdir())) == 1
    assert cli.main([*words, "--seed", "2"]) == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2 and all(name.startswith("pretrain-decoder-tiny-") for name in names)


def test_runs_are_listed_with_how_to_go_on(
    trained: Run, novels: Path, tokenizer: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished, stopped = trained("decoder-causal-0", objective__name="causal"), folder / "stopped"
    words = arguments(novels, stopped, **QUICK | {"data__tokenizer": tokenizer, "trainer__save_every": 4})

    def stop(*_: object) -> None:
        raise RuntimeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "prune", stop)
        with pytest.raises(RuntimeError):
            cli.main(words)
    capsys.readouterr()
    assert cli.main(["runs", str(folder)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith(str(folder))}
    assert " finished " in lines[str(finished)] and f"{min(values(finished, 'val/loss')):.4f}" in lines[str(finished)]
    assert "--resume" not in lines[str(finished)]
    assert "stopped (saved at 4)" in lines[str(stopped)]
    assert f"triptych pretrain --resume {stopped}" in lines[str(stopped)]
    with opened(build(PretrainConfig, [stopped / "config.yaml"], {"resume": str(stopped)}), "any"):
        assert cli.main(["runs", str(stopped)]) == 0
        assert " running " in capsys.readouterr().out
    assert cli.main(["runs", str(folder / "nowhere")]) == 2
    assert "no such folder" in one_line(capsys)


def test_a_dry_run_shows_the_plan_and_leaves_nothing_behind(
    novels: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run, no file in the working folder, none in the folder for temporary files, nothing tracked."""
    (tmp_path / "work").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    run = tmp_path / "work" / "run"
    words = arguments(novels, run, **QUICK | {"data__stores": folder / "stores", "tracking__mode": "offline"})
    capsys.readouterr()
    assert cli.main([*words, "--dry_run"]) == 0
    written = capsys.readouterr().err
    assert "20 steps of 8 × 32 tokens" in written and "parameters" in written and "FLOPs" in written
    assert "val/loss" in written and "only the token store is kept" in written
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["temporary", "work"]
    assert cli.main(without_folder([*words, "--dry_run", "--trainer.max_steps", "5"])) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["temporary", "work"]


# --- Mistakes ----------------------------------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error that was printed, which must be one line, the last, and no traceback."""
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], lines
    assert not any("Traceback" in line for line in lines)
    return errors[0]


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("no such bundle", {"init_from": "/nowhere/bundle"}, "/nowhere/bundle"),
    ("no such tokenizer", {"data__tokenizer": "/nowhere/tokenizer"}, "/nowhere/tokenizer"),
    ("no such corpus", {"data__corpus": "/nowhere/novels"}, "/nowhere/novels"),
    ("a batch larger than the data", {"data__batch_size": 5000}, "data.batch_size"),
    (
        "a sequence longer than the positions",
        {"model__position": "learned", "model__max_positions": 32},
        "data.sequence_length",
    ),
    (
        "a sequence longer than an alignment's table",
        {"model__family": "recurrent", "model__alignment": "location", "model__max_positions": 32},
        "data.sequence_length",
    ),
    (
        "maps of a model that does not attend",
        {"model__family": "recurrent", "tracking__attention_every": 5},
        "tracking.attention_every",
    ),
    ("more devices than there are", {"trainer__devices": 999}, "trainer.devices: 999"),
    ("no such device", {"trainer__accelerator": "gpu"}, "trainer"),
    ("an objective that the family cannot do", {"objective__name": "span"}, "cannot be trained with span"),
    (
        "an objective in the schedule that the family cannot do",
        {"objective__schedule": json.dumps({"causal": 0.5, "span": 0.5})},
        "cannot be trained with span",
    ),
    ("an unknown argument of Lightning's", {"trainer__extra": json.dumps({"nonsense": 1})}, "nonsense"),
    ("an end that saves nothing", {"trainer__extra": json.dumps({"limit_train_batches": 3})}, "use trainer.max_steps"),
    ("an argument of Lightning's that is ours", {"trainer__extra": json.dumps({"max_epochs": 1})}, "max_epochs"),
    ("muon on parts of matrices", {"optim__name": "muon", "trainer__strategy": "fsdp"}, "muon"),
    ("no such run to resume", {"resume": "/nowhere/run"}, "/nowhere/run"),
    ("a key that is none", {"trainer__max_step": 3}, "max_steps"),
    ("no steps at all", {"trainer__max_steps": 0}, "trainer.max_steps"),
    ("a learning rate of zero", {"optim__lr": 0}, "optim.lr"),
]


@pytest.mark.parametrize(("mistake", "settings", "said"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str, settings: dict[str, Any], said: str, novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mistake == "no such device" and torch.cuda.is_available():
        pytest.skip("there is such a device here")
    assert cli.main(arguments(novels, tmp_path / "run", **settings)) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_mistake_before_training_can_be_mended_in_the_same_folder(
    novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what the line says: a smaller batch, or more text, of which the tokenizer learns too."""
    own = {"data__tokenizer": "null", "data__new_tokenizer__vocab_size": 400, "trainer__max_steps": 2}
    own |= {"trainer__save_every": 2, "trainer__validate_every": 2}
    few, folder = tmp_path / "few", tmp_path / "run"
    few.mkdir()
    first, *others = sorted(novels.glob("*.txt"))
    (few / first.name).write_text(first.read_text())
    assert cli.main(arguments(few, folder, **QUICK | own | {"data__batch_size": 5000})) == 2
    windows = int(one_line(capsys).partition("has only ")[2].partition(";")[0])
    words = arguments(few, folder, **QUICK | own | {"data__batch_size": windows + 1})
    assert cli.main(words) == 2
    learnt = json.loads((folder / "tokenizer" / "meta.json").read_text())["corpus_fingerprint"]
    for other in others:
        (few / other.name).write_text(other.read_text())
    assert cli.main(words) == 0
    again = json.loads((folder / "tokenizer" / "meta.json").read_text())["corpus_fingerprint"]
    assert learnt != again == OnDisk(folder).material["corpus"]
    whole = tmp_path / "whole"
    assert cli.main(arguments(few, whole, **QUICK | own | {"data__batch_size": windows + 1})) == 0
    assert distance(weights_of(folder), weights_of(whole)) == 0


def test_a_bundle_of_another_family_or_tokenizer_cannot_go_on(
    trained: Run, novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = trained("decoder-causal-0", objective__name="causal") / "bundle"
    words = arguments(novels, tmp_path / "run", family="encoder", init_from=bundle)
    capsys.readouterr()
    assert cli.main(words) == 2
    assert "is of family decoder, model.family is encoder" in one_line(capsys)
    other = trained("own-tokenizer", data__tokenizer="null", trainer__max_steps=1) / "tokenizer"
    capsys.readouterr()
    assert cli.main(arguments(novels, tmp_path / "other", init_from=bundle, data__tokenizer=other)) == 2
    assert "is not the tokenizer of" in one_line(capsys)


def test_a_bundle_with_too_few_positions_is_refused_before_training(
    trained: Run, novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = {"model__position": "learned", "model__max_positions": 33}
    bundle = trained("learned", trainer__max_steps=1, **learned) / "bundle"
    capsys.readouterr()
    assert cli.main(arguments(novels, tmp_path / "run", init_from=bundle, data__sequence_length=40)) == 2
    assert "the model's 33 positions" in one_line(capsys)
    assert not (tmp_path / "run" / "prepared.json").exists()  # nor was the corpus read


def test_a_store_of_another_tokenizer_is_refused(
    trained: Run, novels: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose record points to tokens that its tokenizer did not make."""
    other = trained("own-tokenizer", data__tokenizer="null", trainer__max_steps=1)
    words = arguments(novels, tmp_path / "run", **QUICK | {"data__tokenizer": tokenizer, "trainer__max_steps": 1})
    assert cli.main(words) == 0
    (tmp_path / "run" / "prepared.json").write_text((other / "prepared.json").read_text())
    (tmp_path / "run" / "bundle" / "meta.json").unlink()
    capsys.readouterr()
    assert cli.main(words) == 2
    assert "made with tokenizer" in one_line(capsys)


def test_folders_that_cannot_be_a_run(
    novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Run
) -> None:
    """A file in its place, a folder with something else in it, a folder that may not be written, one without a run."""
    (tmp_path / "file").write_text("")
    assert cli.main(arguments(novels, tmp_path / "file")) == 2
    assert str(tmp_path / "file") in one_line(capsys)
    assert cli.main(arguments(novels, tmp_path / "file" / "below")) == 2
    assert str(tmp_path / "file") in one_line(capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    assert cli.main(arguments(novels, tmp_path / "other")) == 2
    assert "not empty and not a run" in one_line(capsys)
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["thesis.tex"]
    assert cli.main(["pretrain", "--resume", str(tmp_path / "other")]) == 2
    assert "no run" in one_line(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert cli.main(arguments(novels, tmp_path / "locked")) == 2
    assert "Permission denied" in one_line(capsys)


def test_two_jobs_cannot_work_on_one_run(
    trained: Run, tmp_path: Path, novels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused and touches nothing, while the first goes on."""
    words = arguments(novels, tmp_path / "run", **QUICK)
    options = dict(zip((word[2:] for word in words[1::2]), words[2::2], strict=True))
    options["data.corpus"] = json.dumps([options["data.corpus"]])
    with opened(build(PretrainConfig, [], options), "first"):
        before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
        assert cli.main(words) == 2
        assert "another process works on this run" in one_line(capsys)
        assert cli.main(["pretrain", "--resume", str(tmp_path / "run")]) == 2
        assert "another process works on this run" in one_line(capsys)
        assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. Tried to allocate"), MemoryError()])
@pytest.mark.parametrize(
    ("rows", "retrieval", "remedy"),
    [
        (8, False, "go on with --data.micro_batch_size 4"),
        (8, True, "start again in another folder with --data.micro_batch_size 4"),
        (1, False, "go on with --trainer.recompute"),
        (0, False, "start again with half of data.batch_tokens"),
    ],
)
def test_running_out_of_memory_proposes_what_takes_less(
    error: Exception, rows: int, retrieval: bool, remedy: str
) -> None:
    network = Retriever(make_model(resolve(ModelConfig(size="tiny")), 9), "mean", 0.05) if retrieval else None
    module: Any = SimpleNamespace(micro_batch=rows, network=network)
    with pytest.raises(UserError, match=f"; {remedy}$"), one_line_memory_errors(module):
        raise error
    with pytest.raises(RuntimeError, match="something else"), one_line_memory_errors(module):
        raise RuntimeError("something else")
