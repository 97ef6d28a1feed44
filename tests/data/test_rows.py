"""Rows of a task: what is read from a table, what is held out, and what people are told of a bad row."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.config import TaskConfig, TaskDataConfig, TaskName, TokenizerConfig
from pipeline.data.retrieval import read_documents
from pipeline.data.rows import read_rows, read_task
from pipeline.data.tasks import Encoder, Row
from pipeline.errors import UserError
from pipeline.evaluation.metrics import score_exact
from pipeline.model.config import Family, ModelConfig, resolve
from pipeline.tokenizer import train


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_an_answer_is_right_whatever_blanks_stand_around_it_in_the_table(tmp_path: Path) -> None:
    first = {"source": "q", "target": "yes \n"}
    rows: list[dict[str, Any]] = [first, {"source": "q", "target": "no", "refs": [" never", "nay\n"]}]
    read = read_rows(table(tmp_path / "rows.jsonl", rows), TaskConfig(name="text"), False, "")
    assert score_exact(["yes", "nay"], [row.answers for row in read]).metrics == {"exact_match": 1.0}


def test_references_in_a_column_that_is_named_must_be_there(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"source": "q", "target": "no", "answers": ["nay"], "one": "never"}]
    file = table(tmp_path / "rows.jsonl", rows)
    (row,) = read_rows(file, TaskConfig(name="text", references_column="answers"), False, "")
    assert row.answers == ("nay",)
    assert read_rows(file, TaskConfig(name="text"), False, "")[0].answers == ("no",)  # refs, where there is one
    for column, told in (("anwsers", "row 1: no column 'anwsers'"), ("one", "column 'one' holds 'never'")):
        with pytest.raises(UserError, match=told):
            read_rows(file, TaskConfig(name="text", references_column=column), False, "")


def test_halves_of_characters_become_replacement_marks_wherever_they_stand(tmp_path: Path) -> None:
    """JSON can carry them and UTF-8 cannot: they would break the first file that is written."""
    row = {"source": "a \ud83d", "target": "b \ud83d", "refs": ["c \ud83d"], "label": "d \ud83d"}
    (text,) = read_rows(table(tmp_path / "rows.jsonl", [row]), TaskConfig(name="text"), False, "")
    assert (text.source, text.target, text.references) == ("a \ufffd", "b \ufffd", ("c \ufffd",))
    task = TaskConfig(name="classification", source_column="source")
    (classified,) = read_rows(table(tmp_path / "rows.jsonl", [row]), task, False, "")
    assert classified.label == "d \ufffd"
    documents = table(tmp_path / "corpus.jsonl", [{"_id": "1", "title": "t \ud83d", "text": "e"}])
    assert read_documents(Path(documents).parent, skip=False).texts == {"1": "t \ufffd e"}


def is_drawn(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % 10 == 0


def test_a_class_that_would_be_held_out_as_a_whole_stays_in_training(tmp_path: Path) -> None:
    rare = next(text for text in map(str, range(1000)) if is_drawn(text))
    rows: list[dict[str, Any]] = [
        {"text": f"text {number}", "label": ("neg", "pos")[number % 2]} for number in range(60)
    ]
    rows.insert(7, {"text": rare, "label": "mixed"})
    data = TaskDataConfig(train=table(tmp_path / "rows.jsonl", rows))
    found = read_task(TaskConfig(name="classification"), data, 1)
    assert found.labels == ["mixed", "neg", "pos"]
    assert [row.source for row in found.train].index(rare) < 10
    assert {row.source for row in found.validation} == {row["text"] for row in rows if is_drawn(row["text"])} - {rare}


def test_numbers_of_other_kinds_are_labels_like_words(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": ("m²", "²", "10", "9")[number % 4]} for number in range(60)]
    data = TaskDataConfig(train=table(tmp_path / "rows.jsonl", rows))
    assert read_task(TaskConfig(name="classification"), data, 1).labels == ["10", "9", "m²", "²"]
    alone = TaskDataConfig(
        train=table(tmp_path / "rows.jsonl", [row | {"label": "1²"[n % 2]} for n, row in enumerate(rows)])
    )
    assert read_task(TaskConfig(name="classification"), alone, 1).labels == ["1", "²"]


@pytest.mark.parametrize(
    ("task", "name", "holds"),
    [("retrieval", "sst2", "sentiment"), ("text", "scifact", "retrieval"), ("sentiment", "pg19", "corpus")],
)
def test_a_set_of_the_catalogue_for_something_else_is_not_even_fetched(
    task: TaskName, name: str, holds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"data.train: {name} is for {holds}, not for {task}"):
        read_task(TaskConfig(name=task), TaskDataConfig(train=name), 1)
    assert not (tmp_path / "cache").exists()


def test_only_keys_that_the_command_has_are_named(tmp_path: Path) -> None:
    file = table(tmp_path / "rows.jsonl", [{"body": "x", "label": 1}])
    task = TaskConfig(name="sentiment")
    with pytest.raises(UserError) as of_finetune:
        read_task(task, TaskDataConfig(train=file), 1)
    assert str(of_finetune.value).endswith("it has body, label: choose one with --task.source_column")
    with pytest.raises(UserError) as of_others:
        read_rows(file, task, False, "")
    assert str(of_others.value).endswith("it has body, label")
    with pytest.raises(UserError) as of_empty:
        read_rows(table(tmp_path / "rows.jsonl", [{"text": " ", "label": 1}]), task, False, "")
    assert "on_error" in str(of_empty.value) and "--data" not in str(of_empty.value)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder", "recurrent"])
@pytest.mark.parametrize("tag", [None, "<de>"])
def test_tokens_of_a_text_task_are_those_of_its_texts(family: Family, tag: str | None) -> None:
    """Without what families put around them, as in pretraining and in classification."""
    tokenizer = train(["cat mat"], TokenizerConfig(kind="byte"))
    model = resolve(ModelConfig(family=family, size="tiny"))
    encoder = Encoder(TaskConfig(name="text", tag=tag), model, tokenizer, [], 256, 64)
    assert encoder.example(Row("cat", "mat")).tokens == 6
    assert Encoder(encoder.task, model, tokenizer, [], 2, 64).example(Row("cat", "mat")).tokens == 5
