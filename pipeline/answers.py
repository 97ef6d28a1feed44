"""Rows in, answers out: what a bundle makes of files of texts, and how good that is."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import EmbedConfig, EvaluateConfig, PredictConfig, TextsConfig
from pipeline.data import catalogue
from pipeline.data.config import TaskConfig
from pipeline.data.retrieval import is_held_out, is_learnt, read_documents, read_queries
from pipeline.data.rows import read_rows, row_maker, with_known_labels
from pipeline.data.tables import stream
from pipeline.data.tasks import TASKS, Row
from pipeline.errors import UserError
from pipeline.evaluation.ranking import BM25
from pipeline.files import described, read_json, replacing, write_json
from pipeline.inference import load
from pipeline.terminal import note, print_table, say, warn

CHUNK = 1024  # rows predicted before their results are written
RENAME = ": rename one as it was in training, or make rows with --function"


def evaluate(config: EvaluateConfig) -> None:
    """Print the metrics of a bundle on rows, and write them as JSON if asked to."""
    loaded = load(config.bundle)
    predictor = loaded.predictor(config.batch_size, config.generation)
    task = replace(predictor.encoder.task, function=config.function)
    retrieval = TASKS[task.name].kind == "retrieval"
    file = config.data
    if file in catalogue.ENTRIES:
        folder = catalogue.get(file)
        ends = ("test", "dev") if retrieval else ("test.jsonl", "dev.jsonl")
        found = [path for name in ends if (path := folder / name).exists()]
        if not found:
            raise UserError(f"data: {file} has no rows of a task; see `triptych data list`")
        file = str(found[0])
    skip = config.on_error == "skip"
    queries, meta = read_queries(file, "test", skip) if retrieval else {}, loaded.bundle.meta
    learnt = retrieval and is_learnt(file, str(meta.get("trained_on")), "test")
    if learnt and meta.get("held_out", True):
        note(f"{file}: the model learnt from it; measured on the queries that were held out")
        queries = {name: row for name, row in queries.items() if is_held_out(name)}
    elif learnt:
        warn(f"{file}: the model learnt from these very queries; the scores say nothing of others")
    rows = list(queries.values()) if retrieval else read_rows(file, task, skip, RENAME)
    if predictor.encoder.labels:
        rows = with_known_labels(rows, predictor.encoder.labels, file, skip)
    if not rows:
        raise UserError(f"{file}: no rows to measure on")
    score = predictor.score(rows, predictor.predict(rows))
    scores = {"value": score}
    if rows[0].documents:
        ranked = BM25(rows[0].documents).search([row.source for row in rows])
        scores["BM25"] = predictor.score(rows, ranked)
    table = [(key, *(one.metrics[key] for one in scores.values())) for key in score.metrics]
    print_table(f"{config.bundle} on {config.data}", ("metric", *scores), table)
    for name, signature in score.signatures.items():
        say(f"{name}: {signature}")
    if config.json:
        written = {"metrics": score.metrics, "signatures": score.signatures, "data": file, "bundle": config.bundle}
        write_json(Path(config.json), written)


def predict(config: PredictConfig) -> None:
    """Write a JSON row for each text, a thousand at a time; an output that was interrupted goes on."""
    loaded = load(config.bundle)
    predictor = loaded.predictor(config.batch_size)
    task = replace(predictor.encoder.task, function=config.function)
    index = None
    if TASKS[task.name].kind == "retrieval":
        if config.corpus is None:
            raise UserError("corpus: a bundle fine-tuned for retrieval finds documents; name their folder by --corpus")
        index = predictor.index(read_documents(Path(config.corpus), config.on_error == "skip"))
    elif config.corpus is not None:
        raise UserError(f"corpus: {config.bundle} does {task.name}, which finds no documents; leave it out")
    rows = texts_to_predict(config, task, RENAME)
    made_by = {"weights": loaded.bundle.meta.get("weights_sha256"), "corpus": config.corpus, "top": config.top}
    done = go_on(Path(config.output), rows, made_by) if config.output else 0
    with Path(config.output).open("a", encoding="utf-8") if config.output else nullcontext(sys.stdout) as out:
        while chunk := list(islice(rows, CHUNK)):
            results = iter(predictor.predict([row for row in chunk if row is not None], index))
            for number, row in enumerate(chunk, done):
                result = result_row(number, row, results, predictor.encoder.labels, config.top)
                out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()
            done += len(chunk)


def embed(config: EmbedConfig) -> None:
    """Write the embeddings of texts as a matrix of numpy, a row each."""
    loaded = load(config.bundle)
    if Path(config.output).suffix != ".npy":
        raise UserError(f"output: {config.output} should end in .npy, which numpy.load reads")
    column = TaskConfig(name="retrieval", source_column=config.column)
    texts = texts_to_predict(config, column, ": choose one with --column")
    parts, skipped = [], 0
    while chunk := list(islice(texts, CHUNK)):
        parts.append(loaded.embed([row.source for row in chunk if row is not None], config.batch_size))
        skipped += chunk.count(None)
    if skipped:
        warn(f"{config.input}: {skipped:,} rows skipped, which have no row in the matrix either")
    if not parts:
        raise UserError("texts: nothing to embed")
    with replacing(Path(config.output)) as temporary, temporary.open("wb") as opened:
        np.save(opened, np.concatenate(parts))
    say(f"{config.output}: {sum(map(len, parts)):,} vectors of {parts[0].shape[1]}")


def texts_to_predict(config: TextsConfig, task: TaskConfig, choose: str) -> Iterator[Row | None]:
    """The texts that were typed, or those of a file or of standard input, one after the other."""
    if config.texts:
        return iter([Row(text) for text in config.texts])
    if config.input is None:
        return text_lines(sys.stdin.buffer, "standard input")
    if config.input.endswith(".txt"):
        return text_lines(Path(config.input).open("rb"), config.input)
    return stream(config.input, row_maker(task, choose, answers=False), config.on_error == "skip")


def text_lines(lines: Iterable[bytes], place: str) -> Iterator[Row]:
    """A text on each line; blank ones are none."""
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{place} line {number}: not UTF-8; convert it first") from error
        if text.strip():
            yield Row(text)


def result_row(number: int, row: Row | None, results: Iterator[Any], labels: list[str], top: int) -> dict[str, Any]:
    if row is None:
        return {"row": number, "error": "skipped"}
    result = next(results)
    if isinstance(result, str):
        return {"row": number, "source": row.source, "text": result}
    if not labels:
        documents = [{"id": name, "score": round(score, 6)} for name, score in result[:top]]
        return {"row": number, "source": row.source, "documents": documents}
    chances = dict(zip(labels, (round(float(chance), 6) for chance in result), strict=True))
    return {"row": number, "source": row.source, "label": max(chances, key=chances.__getitem__), "chances": chances}


def go_on(path: Path, rows: Iterator[Row | None], made_by: dict[str, Any]) -> int:
    """How many rows an output has already, which the same model made; a hidden file beside it says which that was."""
    record = path.with_name(f".{path.name}.made-by.json")
    if path.is_file() and path.stat().st_size and record.is_file() and read_json(record) != made_by:
        raise UserError(f"{path}: holds results of another model or settings; choose another --output or delete it")
    if done := pass_over(path, rows):
        note(f"{path}: {done:,} results are there already")
    write_json(record, made_by)
    return done


def pass_over(path: Path, rows: Iterator[Row | None]) -> int:
    """Pass over the rows whose results a file has; a last result that was cut off is removed and made again."""
    done = end = 0
    if not path.is_file():
        return 0
    with path.open("r+b") as opened:
        for line in opened:
            if not line.endswith(b"\n") and line[:8] == b'{"row": '[: len(line)]:
                break
            row = next(rows, None)
            with described(path, "it holds no predictions: choose another --output"):
                source = json.loads(line).get("source")
            if source != (row.source if row else None):
                raise UserError(f"{path}: holds results of other texts; choose another --output or delete it")
            done, end = done + 1, end + len(line)
        opened.truncate(end)
    return done
