"""What fine-tuning leaves behind: tables, pictures, several seeds, tasks of the user's own."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline import cli
from pipeline.data.batch import collate
from pipeline.training.taskjob import MEASURED
from tests.training.jobs import finish, last_step, signal_when, start
from tests.training.test_finetune import reviews, words, write_rows

PNG = b"\x89PNG"
PROJECT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_rows(folder / "train.jsonl", reviews(120, 1))
    write_rows(folder / "dev.jsonl", reviews(60, 2))
    return folder


def test_a_classifier_leaves_its_surest_mistakes_and_a_picture(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main(words(folder, run, trainer__max_steps=2)) == 0
    assert (run / "val-confusion.png").read_bytes().startswith(PNG)
    mistakes = [json.loads(line) for line in (run / "val-mistakes.jsonl").read_text().splitlines()]
    labels = {row["text"]: str(row["label"]) for row in reviews(60, 2)}
    chances = pipeline.load(str(run / "bundle")).classify(list(labels))
    wrong = [
        (max(chance.values()), text)
        for (text, label), chance in zip(labels.items(), chances, strict=True)
        if max(chance, key=lambda name: chance[name]) != label
    ]
    assert mistakes and [one["confidence"] for one in mistakes] == sorted(one["confidence"] for one in mistakes)[::-1]
    assert {one["source"] for one in mistakes} == {text for _, text in sorted(wrong, reverse=True)[:10]}
    assert all(labels[one["source"]] == one["expected"] != one["predicted"] for one in mistakes)


def string_words(run: Path, task: str, **more: Any) -> list[str]:
    settings = {"task__examples": 100, "task__longest": 6, "trainer__max_steps": 2, "generation__max_new_tokens": 8}
    return words(run.parent, run, task, data__new_tokenizer__kind="character", **settings | more)


@pytest.mark.parametrize(
    ("task", "family", "alignment", "drawn"),
    [
        ("reversal", "recurrent", "general", {"cross.png"}),
        ("case", "encoder-decoder", "dot", {"cross.png", "decoder.png", "encoder.png"}),
        ("reversal", "recurrent", "none", set()),
    ],
)
def test_strings_leave_an_alignment_map_and_accuracy_by_length(
    task: str, family: str, alignment: str, drawn: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main(string_words(run, task, model__family=family, model__alignment=alignment)) == 0
    assert {path.name for path in run.glob("attention/*.png")} == drawn
    title, header, *table = capsys.readouterr().out.split(f"{task}, ")[-1].splitlines()
    assert title == "by length" and header.split() == ["length", "val", "exact_match", "test", "exact_match"]
    assert 4 <= sum(line.strip()[:1].isdigit() for line in table) <= 6


@pytest.mark.slow
def test_without_attention_long_strings_are_lost(tmp_path: Path) -> None:
    """The finding of the worksheet: one state holds short strings; who looks back solves all."""
    found = {}
    for alignment in ("dot", "none"):
        run = tmp_path / alignment
        config = str(PROJECT / "configs" / "finetune" / "reversal-recurrent.yaml")
        settings = ["--model.alignment", alignment, "--tracking.mode", "disabled", "--trainer.accelerator", "cpu"]
        assert cli.main(["finetune", "--config", config, *settings, "--run_dir", str(run)]) == 0
        found[alignment] = load_metrics(run)
    attentive, bottleneck = (
        [one[f"test/exact_match_length_{length}"] for length in (14, 15, 16)] for one in found.values()
    )
    assert min(attentive) > 0.9 and max(bottleneck) < 0.5
    assert found["none"]["test/exact_match_length_05"] > 0.8


def test_measuring_takes_as_many_rows_as_the_settings_say(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(examples: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(examples))
        return collate(examples, *rest, **more)

    monkeypatch.setattr("pipeline.training.taskjob.collate", counted)
    for given, most in ((4, 4), (None, MEASURED)):
        sizes.clear()
        more: dict[str, Any] = {} if given is None else {"data__micro_batch_size": given}
        assert cli.main(words(folder, tmp_path / f"run{given}", trainer__max_steps=1, **more)) == 0
        assert max(sizes) == most and sum(sizes) == 60


# --- Several seeds ---


@pytest.mark.slow
def test_several_seeds_that_were_stopped_go_on(folder: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out.txt"
    command = [*words(folder, run, trainer__max_epochs=15, trainer__save_every=20), "--seeds", "2"]
    second = tmp_path / "run-seed2"
    assert signal_when(start(command, output), lambda: last_step(second) >= 4, signal.SIGTERM) == 75
    weights = tmp_path / "run-seed1" / "bundle" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert not (second / "bundle").exists()
    assert finish(command, output, timeout=300) == 0, output.read_text()
    assert weights.stat().st_mtime_ns == before and (second / "bundle" / "meta.json").is_file()
    assert "going on from step" in output.read_text()


def test_several_seeds_are_runs_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.training import seeds

    outcomes = iter([None, 75, None, None, 2])  # seeds 3 and 4, of which the second is stopped; both again; a failure

    def run_command(words: list[str]) -> int:
        code = next(outcomes)
        return cli.main(words) if code is None else code

    monkeypatch.setattr(seeds, "run_command", run_command)
    command = [*words(folder, tmp_path / "run", trainer__max_steps=12), "--seeds", "2", "--seed", "3"]
    assert cli.main(command) == 75
    assert cli.main(command) == 0
    told = capsys.readouterr()
    assert "run-seed3: finished before" in told.err and "± deviation" in told.out and "run-seed4/bundle" in told.out
    metas = [json.loads((tmp_path / f"run-seed{seed}" / "bundle" / "meta.json").read_text()) for seed in (3, 4)]
    found = [meta["metrics"]["val/calibration_error"] for meta in metas]
    assert found[0] != found[1]
    written = json.loads((tmp_path / "run-seeds.json").read_text())["val/calibration_error"]
    assert written["seeds"] == found and written["mean"] == pytest.approx(sum(found) / 2)
    assert written["deviation"] == pytest.approx(abs(found[0] - found[1]) / 2**0.5)
    assert cli.main(command) == 2
    assert "run-seed3: ended with exit code 2" in capsys.readouterr().err


# --- Tasks of the user's own ---

FUNCTION = '''
def row(columns):
    """A mail is urgent if it says so; its subject counts twice."""
    label = "urgent" if columns["stars"] == "5" else "later"
    return {"source": columns["subject"] + " " + columns["body"], "label": label}


def answer(columns):
    return {"source": "about " + columns["body"], "target": columns["body"], "references": [columns["body"], "x"]}


def broken(columns):
    return columns["nothing"]


def wrong(columns):
    return "text"
'''


def mails(folder: Path) -> Path:
    lines = ["subject,body,stars"]
    for number in range(60):
        urgent = number % 2
        lines.append(f"{'now' if urgent else 'some day'},letter {number},{5 if urgent else number % 4}")
    (folder / "mails.csv").write_text("\n".join(lines) + "\n")
    (folder / "my_task.py").write_text(FUNCTION)
    (folder / "my_task.yaml").write_text(
        f"task:\n  name: classification\n  function: {folder}/my_task.py:row\ndata:\n  train: {folder}/mails.csv\n"
        "  new_tokenizer:\n    vocab_size: 400\n  batch_size: 8\nmodel:\n  size: tiny\n  width: 32\n"
        "optim:\n  lr: 3.0e-3\n  warmup_steps: 2\n"
        "trainer:\n  max_epochs: 3\n  accelerator: cpu\ntracking:\n  mode: disabled\n"
    )
    return folder / "my_task.yaml"


def test_a_yaml_file_and_a_function_are_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle does not bring code with it: who uses it names the function again."""
    config, run = mails(tmp_path), tmp_path / "run"
    assert cli.main(["finetune", "--config", str(config), "--run_dir", str(run)]) == 0
    meta = json.loads((run / "bundle" / "meta.json").read_text())
    assert meta["labels"] == ["later", "urgent"] and meta["metrics"]["val/accuracy"] == 1
    evaluate = ["evaluate", str(run / "bundle"), "--data", str(tmp_path / "mails.csv")]
    assert cli.main(evaluate) == 2
    assert "no column 'text'; it has subject, body, stars" in capsys.readouterr().err
    assert cli.main([*evaluate, "--function", f"{tmp_path}/my_task.py:row"]) == 0
    (tmp_path / "my_task.py").write_text("raise SystemExit('code of a bundle was run')")
    assert cli.main(["predict", str(run / "bundle"), "now letter 7"]) == 0


def test_own_texts_are_judged_to_the_letter(tmp_path: Path) -> None:
    config, run = mails(tmp_path), tmp_path / "run"
    own = ["--task.name", "text", "--task.function", f"{tmp_path}/my_task.py:answer", "--model.family", "decoder"]
    more = ["--trainer.max_steps", "2", "--generation.max_new_tokens", "4", "--data.sequence_length", "16"]
    assert cli.main(["finetune", "--config", str(config), *own, *more, "--run_dir", str(run)]) == 0
    assert {"val/exact_match", "val/bleu", "val/chrf"} <= set(load_metrics(run))


def load_metrics(run: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((run / "bundle" / "meta.json").read_text())["metrics"]
    return metrics


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere.py:row", "task.function: no file 'nowhere.py' of Python"),
        ("FOLDER/my_task.py:missing", "has no function 'missing'"),
        ("FOLDER/my_task.py:broken", "mails.csv row 1: FOLDER/my_task.py:broken: KeyError: 'nothing'"),
        ("FOLDER/my_task.py:wrong", "mails.csv row 1: FOLDER/my_task.py:wrong: made 'text', not a dict"),
        ("FOLDER/my_task.py", "task.function: FILE.py:NAME"),
        ("FOLDER/mails.csv:row", "of Python"),
        ("FOLDER/bad.py:row", "bad.py cannot be run: SyntaxError"),
    ],
)
def test_a_wrong_function_is_one_line(
    function: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mails(tmp_path)
    (tmp_path / "bad.py").write_text("def row(:")
    named = function.replace("FOLDER", str(tmp_path))
    assert cli.main(["finetune", "--config", str(config), "--task.function", named]) == 2
    error = capsys.readouterr().err
    assert message.replace("FOLDER", str(tmp_path)) in error and "Traceback" not in error
