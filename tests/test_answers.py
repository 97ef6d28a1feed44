"""Rows in, answers out: what is read, what is gone on with, and what is refused."""

from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.answers import pass_over, text_lines
from pipeline.bundle import Bundle, make_model, save_bundle
from pipeline.config import GenerationConfig
from pipeline.data.config import TaskConfig, TokenizerConfig
from pipeline.data.tasks import Row
from pipeline.errors import UserError
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.heads import ClassificationHead
from pipeline.tokenizer import train


@pytest.mark.parametrize("content", ["some notes\nof mine\n", "some notes", "[1]\n"])
def test_a_file_without_predictions_is_not_gone_on_with(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=r"notes.txt: .* it holds no predictions: choose another --output"):
        pass_over(path, iter([Row("a"), Row("b")]))
    assert path.read_text() == content


@pytest.mark.parametrize("cut", ['{"row": 1, "sou', '{"r', ""])
def test_a_last_prediction_that_was_cut_off_is_made_again(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"row": 0, "source": "a", "text": "x"}\n' + cut)
    rows = iter([Row("a"), Row("b")])
    assert pass_over(path, rows) == 1 and next(rows) == Row("b")
    assert path.read_text() == '{"row": 0, "source": "a", "text": "x"}\n'


def test_embed_names_its_own_key_for_a_missing_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text('{"body": "x"}\n')
    tokenizer = train(["x"], TokenizerConfig(kind="byte"))
    model = make_model(resolve(ModelConfig(family="encoder", size="tiny", width=32)), tokenizer.vocab_size)
    save_bundle(Bundle(model, tokenizer), tmp_path / "bundle")
    command = ["embed", str(tmp_path / "bundle"), "--input", str(table), "--output", str(tmp_path / "x.npy")]
    assert cli.main(command) == 2
    assert capsys.readouterr().err.endswith("row 1: no column 'text'; it has body: choose one with --column\n")


def classifier(folder: Path, seed: int) -> str:
    """A bundle for a task, with weights of its own."""
    import torch

    torch.manual_seed(seed)
    tokenizer = train(["a film"], TokenizerConfig(kind="byte"))
    model = make_model(resolve(ModelConfig(family="encoder", size="tiny", width=32)), tokenizer.vocab_size)
    model.classifier = ClassificationHead(32, 2, 0.0)
    task = {"task": asdict(TaskConfig(name="sentiment")), "labels": ["0", "1"], "pooling": "mean"}
    facts = {"generation": asdict(GenerationConfig()), "source_length": 32, "target_length": 0}
    save_bundle(Bundle(model, tokenizer, task | facts), folder)
    return str(folder)


def test_results_of_another_model_are_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = classifier(tmp_path / "one", 1), classifier(tmp_path / "other", 2)
    (tmp_path / "in.txt").write_text("good\nbad\n")
    rest = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["predict", one, *rest]) == 0
    first = (tmp_path / "out.jsonl").read_text()
    assert cli.main(["predict", one, *rest]) == 0 and "2 results are there already" in capsys.readouterr().err
    assert cli.main(["predict", other, *rest]) == 2
    assert "out.jsonl: holds results of another model or settings" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "BUNDLE", "good", "--input", "x.jsonl"], "input: x.jsonl would not be read beside texts"),
        (["embed", "BUNDLE", "good", "--input", "x.txt", "--output", "x.npy"], "input: x.txt would not be read"),
        (["predict", "BUNDLE", "--input", "x.txt", "--function", "f.py:f"], "function: makes rows of a table"),
        (["predict", "BUNDLE", "good", "--function", "f.py:f"], "function: makes rows of a table"),
        (["predict", "BUNDLE", "--function", "f.py:f"], "function: makes rows of a table"),
        (["predict", "BUNDLE", "good", "--corpus", "x"], "does sentiment, which finds no documents"),
        (
            ["attention", "BUNDLE", "good", "--target", "bad", "--output", "x"],
            "a model of family encoder reads one text",
        ),
    ],
)
def test_nothing_that_was_typed_is_dropped(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = classifier(tmp_path / "bundle", 1)
    capsys.readouterr()
    assert cli.main([bundle if word == "BUNDLE" else word for word in words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize("content", ["good\nbad\n", "\ufeffgood\r\nbad\r\n", "good\n\n  \nbad"])
def test_lines_of_text_are_the_same_however_they_are_written(tmp_path: Path, content: str) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(content.encode())
    with path.open("rb") as lines:
        assert list(text_lines(lines, "in.txt")) == [Row("good"), Row("bad")]


def test_lines_that_are_no_utf_8_are_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in.txt line 2: not UTF-8; convert it first"):
        list(text_lines([b"good\n", "café".encode("cp1252")], "in.txt"))


def test_embed_says_which_rows_the_matrix_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text('{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
    words = ["--input", str(table), "--output", str(tmp_path / "out.npy"), "--on_error", "skip"]
    assert cli.main(["embed", classifier(tmp_path / "bundle", 1), *words]) == 0
    assert "rows.jsonl: 1 rows skipped, which have no row in the matrix either" in capsys.readouterr().err
