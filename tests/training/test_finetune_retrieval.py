"""Retrieval: every transformer learns to find documents, judged and split as others do it."""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline
from pipeline import cli
from pipeline.bundle import load_bundle
from pipeline.data.batch import collate
from pipeline.data.config import TaskConfig, TaskDataConfig
from pipeline.data.retrieval import read_queries
from pipeline.data.rows import read_task
from pipeline.data.tasks import TRANSFORMERS, Encoder
from pipeline.errors import UserError
from pipeline.evaluation.predicting import embeddings
from pipeline.training.module import Retriever
from tests.training.jobs import arguments, write_novels
from tests.training.test_finetune import words, write_rows

TOPICS = (
    ("storm sea boat", "gale ocean ship"),
    ("tree rose lawn", "garden flower hedge"),
    ("coin bank debt", "money purse gold"),
    ("king crown court", "prince throne duke"),
    ("horse cart road", "coach gallop lane"),
    ("soup bread wine", "meal feast supper"),
)
"""What a query says, and what the documents that answer it say."""
FILLER = "the of a and with under over that was".split()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def text(draw: random.Random, own: str) -> str:
    chosen = [draw.choice(own.split()) for _ in range(2)] + draw.choices(FILLER, k=draw.randrange(3, 9))
    return " ".join(draw.sample(chosen, len(chosen)))


def write_set(folder: Path, seed: int = 1) -> Path:
    """Documents and queries of a few topics that share no telling word: only who learns can find."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    documents = [
        {"_id": f"d{topic}-{number}", "title": text(draw, TOPICS[topic][1]), "text": text(draw, TOPICS[topic][1])}
        for topic in range(len(TOPICS))
        for number in range(4)
    ]
    queries = [{"_id": f"q{number}", "text": text(draw, TOPICS[number % len(TOPICS)][0])} for number in range(90)]
    write_rows(folder / "corpus.jsonl", documents)
    write_rows(folder / "queries.jsonl", queries)
    judged = [f"q{number}\td{number % len(TOPICS)}-{place}\t1\n" for number in range(90) for place in (0, 1, 2)]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("beir"))


def search_words(folder: Path, run: Path, **more: Any) -> list[str]:
    settings: dict[str, Any] = {
        "data__sequence_length": 40, "data__batch_size": 32, "trainer__max_epochs": 6, "trainer__validate_every": 40,
        "model__dropout": 0, "task__temperature": 0.1,
    } | more  # fmt: skip
    made = words(folder, run, "retrieval", **{"data__train": folder} | settings)
    place = made.index("--data.validation")
    return made[:place] + made[place + 2 :]


@pytest.fixture(scope="module")
def bundles(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {family: tmp_path_factory.mktemp("runs") / family for family in TRANSFORMERS}
    for family, run in runs.items():
        assert cli.main(search_words(folder, run, model__family=family)) == 0
    return {family: run / "bundle" for family, run in runs.items()}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_transformer_finds_what_shares_no_word(family: str, bundles: dict[str, Path]) -> None:
    """A fifth of the documents answers each query; BM25 is told nothing by their words."""
    metrics = load_bundle(bundles[family]).meta["metrics"]
    assert metrics["val/ndcg@10"] > 0.75 and metrics["val/recall@100"] == 1
    assert (bundles[family].parent / "val-samples.jsonl").read_text().count("\n") == 10


def test_a_recurrent_model_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(search_words(folder, tmp_path / "run", model__family="recurrent")) == 2
    expected = "a model of family recurrent cannot do retrieval; use encoder or decoder or encoder-decoder"
    assert expected in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_negatives(bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """They are the others of a micro-batch, whose size other tasks may change."""
    again = ["finetune", "--resume", str(bundles["encoder"].parent), "--data.micro_batch_size", "4"]
    assert cli.main(again) == 2
    assert "cannot go on with data.micro_batch_size" in capsys.readouterr().err


def test_evaluating_prints_bm25_beside_it(
    folder: Path, bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(bundles["encoder"]), "--data", str(folder), "--json", str(tmp_path / "scores.json")]
    assert cli.main(command) == 0
    assert "BM25" in capsys.readouterr().out
    told = json.loads((tmp_path / "scores.json").read_text())
    assert set(told["metrics"]) == {"ndcg@10", "mrr@10", "recall@100"} and "trec_eval" in told["signatures"]["ranking"]
    held_out = json.loads((bundles["encoder"] / "meta.json").read_text())["metrics"]
    assert told["metrics"] == pytest.approx({key: held_out[f"val/{key}"] for key in told["metrics"]}, abs=1e-6)


def test_evaluating_takes_what_was_held_out_however_the_set_is_written(
    folder: Path, bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing was held out by hash, it says that the model learnt from all of it."""
    own = write_set(tmp_path / "own", 2)
    more = ["--data.validation", str(own)]
    assert cli.main([*search_words(folder, tmp_path / "run", trainer__max_epochs=1), *more]) == 0
    for place in (f"{folder}/", os.path.relpath(folder), folder / "qrels.tsv"):
        capsys.readouterr()
        assert cli.main(["evaluate", str(bundles["encoder"]), "--data", str(place)]) == 0
        assert "measured on the queries that were held out" in capsys.readouterr().err
        assert cli.main(["evaluate", str(tmp_path / "run" / "bundle"), "--data", str(place)]) == 0
        assert "warning: " in (told := capsys.readouterr().err) and "learnt from these very queries" in told
    assert cli.main(["evaluate", str(tmp_path / "run" / "bundle"), "--data", str(own)]) == 0
    assert "learnt from" not in capsys.readouterr().err


def test_documents_are_predicted_and_searched_for(folder: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    command = ["predict", bundles["decoder"], "--input", folder / "queries.jsonl", "--corpus", folder, "--top", "3"]
    assert cli.main([*map(str, command), "--output", str(output), "--batch_size", "7"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 90 and all(len(row["documents"]) == 3 for row in rows)
    loaded = pipeline.load(str(bundles["decoder"]))
    ranking = loaded.search(rows[5]["source"], str(folder), top=3)
    assert [name for name, _ in ranking] == [one["id"] for one in rows[5]["documents"]]
    assert [score for _, score in ranking] == pytest.approx([one["score"] for one in rows[5]["documents"]], abs=2e-6)
    among = loaded.search("storm at sea", ["the money and the purse", "the ocean gale and ship"])
    assert sorted(name for name, _ in among) == ["0", "1"]


def test_any_transformer_embeds_texts_alike_in_any_batch_and_can_be_tuned(
    folder: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    novels = write_novels(tmp_path / "novels")
    assert cli.main(arguments(novels, tmp_path / "run", "decoder", trainer__max_steps=1)) == 0
    texts = ["a storm", "the garden of the king and the long road under the trees", "gold"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    for bundle in (*bundles.values(), tmp_path / "run" / "bundle"):
        command = ["embed", str(bundle), "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "x.npy")]
        assert cli.main(command) == 0
        matrix = np.load(tmp_path / "x.npy")
        assert matrix.shape == (3, 32) and np.linalg.norm(matrix, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
        alone = np.concatenate([pipeline.load(str(bundle)).embed([one]) for one in texts])
        assert np.abs(alone - matrix).max() < 2e-6
    start = {"init_from": tmp_path / "run" / "bundle", "trainer__max_steps": 1, "trainer__validate_every": 9}
    assert cli.main(search_words(folder, tmp_path / "tuned", **start)) == 0
    assert load_bundle(tmp_path / "tuned" / "bundle").meta["metrics"]["val/recall@100"] == 1


def test_a_relevant_document_is_never_a_negative(folder: Path, bundles: dict[str, Path]) -> None:
    """The loss beside one that loops over the pairs of a batch with their ids."""
    bundle = load_bundle(bundles["encoder-decoder"])
    encoder = Encoder(TaskConfig(name="retrieval"), bundle.model.architecture, bundle.tokenizer, [], 40, 0)
    rows = read_task(TaskConfig(name="retrieval"), TaskDataConfig(train=str(folder)), 1).train[:20]
    batch = collate([encoder.example(row) for row in rows], pad=0)
    network = Retriever(bundle.model, "mean", 0.1)
    with torch.no_grad():
        losses = network(batch, each=True)
        assert batch.documents is not None
        queries, documents = (embeddings(bundle.model, part, "mean") for part in (batch, batch.documents))
        for number, row in enumerate(rows):
            good = {name for name, grade in row.judged if grade > 0}
            kept = [other for other, pair in enumerate(rows) if other == number or pair.target not in good]
            assert len(kept) < len(rows)
            scores = torch.stack([queries[number] @ documents[other] / 0.1 for other in kept])
            expected = torch.logsumexp(scores, 0) - queries[number] @ documents[number] / 0.1
            assert losses[number].item() == pytest.approx(expected.item(), abs=1e-5)
        assert network(batch).item() == pytest.approx(losses.sum().item(), rel=1e-6)
        assert batch.loss_positions == len(rows)
        nothing = collate([], pad=0, like=encoder.example(rows[0]))
        assert network(nothing).item() == 0 and nothing.loss_positions == 0


def test_splits_are_those_of_the_files_or_of_the_hash(folder: Path, tmp_path: Path) -> None:
    def read(**places: str) -> list[set[str]]:
        rows = read_task(TaskConfig(name="retrieval"), TaskDataConfig(**places), 1)  # type: ignore[arg-type]
        return [{row.source for row in split} for split in (rows.train, rows.validation, rows.test)]

    queries = {row["_id"]: row["text"] for row in map(json.loads, (folder / "queries.jsonl").read_text().splitlines())}
    held_out = {name for name in queries if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0}
    train, validation, test = read(train=str(folder))
    assert validation == {queries[name] for name in held_out} and not test
    assert train == {queries[name] for name in queries.keys() - held_out}
    assert read(train=str(folder), validation=str(folder)) == [train, validation, test]
    for same in (f"{folder}/", folder.parent / "." / folder.name / "qrels.tsv", Path(os.path.relpath(folder))):
        assert read(train=str(folder), validation=str(same)) == [train, validation, test]
        with pytest.raises(UserError, match="data.test: .* has the queries of data.train; name others"):
            read(train=str(folder), test=str(same))
    other = write_set(tmp_path / "other")
    header, *lines = (other / "qrels.tsv").read_text().splitlines(keepends=True)
    (other / "qrels.tsv").unlink()
    (other / "qrels").mkdir()
    for number, split in enumerate(("train", "dev", "test")):
        (other / "qrels" / f"{split}.tsv").write_text(header + "".join(lines[90 * number : 90 * (number + 1)]))
    assert (
        read(train=str(other), test=f"{other}/")
        == read(train=str(other))
        == [{queries[f"q{n}"] for n in range(s, s + 30)} for s in (0, 30, 60)]
    )
    assert len(read_queries(str(other), "test", False)) == 30
    assert read(train=str(folder), validation=str(other / "qrels" / "test.tsv"))[1] == {
        queries[f"q{n}"] for n in range(60, 90)
    }


def test_sets_of_the_catalogue_have_a_folder_for_each_split(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, split in enumerate(("train", "dev")):
        write_set(tmp_path / split, seed)
    monkeypatch.setattr("pipeline.data.catalogue.get", lambda name: tmp_path)
    rows = read_task(TaskConfig(name="retrieval"), TaskDataConfig(train="retrieval-narrativeqa"), 1)
    assert (len(rows.train), len(rows.validation), len(rows.test)) == (270, 90, 0)
    assert rows.train[0].documents is not rows.validation[0].documents
    assert cli.main(["evaluate", str(bundles["encoder"]), "--data", "retrieval-narrativeqa"]) == 0
    assert "ndcg@10" in capsys.readouterr().out


WRONG: dict[str, tuple[str, str, str]] = {
    "no corpus": ("corpus.jsonl", "", "corpus.jsonl: no such file"),
    "no queries": ("queries.jsonl", "", "queries.jsonl: no such file"),
    "no judgements": ("qrels.tsv", "", "qrels.tsv: no such file"),
    "no id": ("corpus.jsonl", '{"text": "x"}', "corpus.jsonl row 25: column '_id' is missing"),
    "no text": ("corpus.jsonl", '{"_id": "x", "title": "", "text": null}', "corpus.jsonl row 25: 'x' has no text"),
    "twice": ("corpus.jsonl", '{"_id": "d0-0", "text": "x"}', "corpus.jsonl row 25: _id 'd0-0' comes a second time"),
    "no object": ("queries.jsonl", "[]", "queries.jsonl line 91: expected an object"),
    "empty query": ("queries.jsonl", '{"_id": "x", "text": " "}', "queries.jsonl row 91: 'x' has no text"),
    "no query": ("qrels.tsv", "nobody\td0-0\t1", "qrels.tsv row 271: 'nobody' is not in queries.jsonl"),
    "no document": ("qrels.tsv", "q0\tnothing\t1", "qrels.tsv row 271: 'nothing' is not in corpus.jsonl"),
    "no grade": ("qrels.tsv", "q0\td0-0\tgood", "qrels.tsv row 271: column 'score' holds 'good'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_set_is_one_line_with_file_and_row_or_is_skipped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, line, message = WRONG[name]
    path = write_set(tmp_path / "set") / file
    if line:
        path.write_text(path.read_text() + line + "\n")
    else:
        path.unlink()
    assert cli.main(search_words(path.parent, tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    if "row" in message:
        data = TaskDataConfig(train=str(path.parent), on_error="skip")
        rows = read_task(TaskConfig(name="retrieval"), data, 1)
        assert len(rows.train) + 3 * len(rows.validation) == 270
        assert "1 of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["predict", "BUNDLE", "storm"], "name their folder by --corpus"),
        (["predict", "BUNDLE", "storm", "--corpus", "nowhere"], "nowhere/corpus.jsonl: no such file"),
        (["predict", "BUNDLE", "storm", "--corpus", "nowhere", "--top", "0"], "top: 0 must be from 1 to 100"),
        (["embed", "BUNDLE", "storm", "--output", "x.txt"], "should end in .npy"),
        (["evaluate", "BUNDLE", "--data", "nowhere"], "no such file; retrieval reads a folder with"),
        (["finetune", "--task.name", "retrieval", "--task.temperature", "0"], "task.temperature: 0.0 must be above 0"),
        (["finetune", "--task.name", "retrieval", "--data.batch_tokens", "64"], "retrieval takes its negatives"),
        (["finetune", "--task.name", "retrieval", "--task.label_smoothing", "0.1"], "retrieval has no classes"),
        (["finetune", "--task.name", "retrieval", "--freeze"], "only classification has a head"),
        (["finetune", "--task.name", "retrieval", "--data.micro_batch_size", "1"], "needs 2 rows or more on a device"),
        (["finetune", "--task.name", "retrieval"], "data.train: task retrieval needs rows"),
    ],
)
def test_mistakes_are_one_line(
    wrong: list[str], message: str, bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(bundles["encoder"]) if word == "BUNDLE" else word for word in wrong]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_bundle_for_one_thing_says_that_it_does_not_do_another(bundles: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="fine-tuned for retrieval, which is no classification task"):
        pipeline.load(str(bundles["encoder"])).classify(["x"])
