"""The folder of a run: what is trusted when it goes on, and what may not be written over."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.bundle import load_bundle
from pipeline.training import pretraining, taskjob
from pipeline.training.run import Run
from tests.training.jobs import arguments, write_novels
from tests.training.test_finetune import reviews, words, write_rows

SHORT: dict[str, Any] = {"trainer__max_steps": 2, "trainer__save_every": 1, "tracking__samples_every": 0}


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels", count=3, paragraphs=6)


@pytest.fixture(scope="module")
def run(novels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(arguments(novels, path, **SHORT)) == 0
    return path


def test_nothing_to_validate_on_is_said_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows too short for their ends to be held out, of which the hash draws none."""
    rows = [{"text": f"the captain looked at the {n}th of the grey seas"} for n in range(200)]
    write_rows(tmp_path / "rows.jsonl", rows)
    more = {"data__validation_fraction": 0.0, "data__new_tokenizer__kind": "byte"}
    assert cli.main(arguments(tmp_path / "rows.jsonl", tmp_path / "run", **SHORT | more)) == 2
    told = capsys.readouterr().err
    assert "no validation text" in told and "data.validation_fraction" in told and "data.validation_books" in told
    assert "warning" not in told and not Run(tmp_path / "run").begun


@pytest.mark.parametrize("killed", [False, True])
def test_text_that_changed_before_training_began_is_read_again(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C, which runs what is to be tidied up, and after a kill, which does not."""
    novels, path = write_novels(tmp_path / "novels", count=3, paragraphs=6), tmp_path / "run"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "train_job", stop)
        if killed:
            patch.setattr(Run, "forget_material", lambda _: None)
        assert cli.main(arguments(novels, path, **SHORT)) == 1
    assert (path / "prepared.json").is_file() == killed
    write_novels(novels, count=4, paragraphs=6)
    assert cli.main(arguments(novels, path, **SHORT)) == 0
    assert cli.main(arguments(novels, tmp_path / "other", **SHORT)) == 0
    assert Run(path).material == Run(tmp_path / "other").material


@pytest.mark.parametrize("killed", [False, True])
def test_rows_that_changed_before_training_began_are_read_again(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "train.jsonl", reviews(40, 1))
    write_rows(tmp_path / "dev.jsonl", reviews(20, 2))
    words_of_it = words(tmp_path, tmp_path / "run", trainer__max_epochs=1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(taskjob.TaskJob, "training", stop)
        if killed:
            patch.setattr(Run, "forget_material", lambda _: None)
        assert cli.main(words_of_it) == 1
    write_rows(tmp_path / "train.jsonl", reviews(40, 3))
    assert cli.main(words_of_it) == 0


# --- What commands write over ------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_written_over_that_another_command_made(
    run: Path, novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, the bundle that it has or is to end with, a tokenizer, a bundle that was trained."""
    exported, tokenizer = tmp_path / "exported", tmp_path / "tokenizer"
    gpt2 = {"model__preset": "gpt2", "model__max_positions": 64}
    assert cli.main(arguments(novels, tmp_path / "gpt2", **SHORT | gpt2)) == 0
    assert cli.main(["export", str(tmp_path / "gpt2" / "bundle"), str(exported)]) == 0
    train = ["tokenizer", "train", "--corpus", str(novels), "--kind", "byte", "--workers", "1", "--output"]
    assert cli.main([*train, str(tokenizer)]) == 0
    bundle, imported = ["bundle", str(run), "--output"], ["import", str(exported)]
    (run / "bundle").rename(run.parent / "kept")  # as before it is finished
    capsys.readouterr()
    for number, (command, target) in enumerate(
        [(bundle, run / "bundle"), (imported, run / "bundle"), (train, run / "bundle"), (bundle, run), (imported, run),
         (train, run), (bundle, tokenizer), (imported, tokenizer), (imported, run.parent / "kept"),
         (train, exported), (imported, exported)]
    ):  # fmt: skip
        before = content(run.parent) | content(tmp_path)
        assert cli.main([*command, str(target)]) == 2
        told = capsys.readouterr().err
        assert "choose another" in told and told.count("error: ") == 1
        assert ("is for its run to write" in told) == (number < 3)
        assert content(run.parent) | content(tmp_path) == before
    (run.parent / "kept").rename(run / "bundle")
    assert cli.main([*bundle, str(run / "bundle")]) == 2  # nor is the best replaced by the last


def test_the_same_bundle_is_made_again_also_where_it_was_broken_off(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for folder, more in ((run / "bundle-00000002", []), (new, ["--output", str(new)])):
        for missing in range(4):
            for name in ("meta.json", "tokenizer.json", "config.yaml")[:missing]:  # the last that was written first
                (folder / name).unlink()
            assert cli.main(["bundle", str(run), *more]) == 0
            assert load_bundle(folder).meta["step"] == 2
        (folder / "notes.txt").write_text("of mine")
        (folder / "meta.json").unlink()
        assert cli.main(["bundle", str(run), *more]) == 2


def test_a_folder_with_nothing_but_hidden_files_is_empty(novels: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".gitkeep").touch()
    train = ["tokenizer", "train", "--corpus", str(novels), "--kind", "byte", "--workers", "1", "--output"]
    assert cli.main([*train, str(tmp_path / "mine")]) == 0
    assert json.loads((tmp_path / "mine" / "meta.json").read_text())["settings"]["kind"] == "byte"
