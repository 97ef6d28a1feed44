"""Using a bundle: its task on texts, what it writes, where it looks."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bundle import Bundle, load_bundle
from pipeline.config import (
    AnswerConfig,
    AttentionConfig,
    EmbedConfig,
    EvaluateConfig,
    GenerateConfig,
    GenerationConfig,
    PredictConfig,
    TextsConfig,
)
from pipeline.data import catalogue
from pipeline.data.config import TaskConfig
from pipeline.data.retrieval import read_documents, read_queries
from pipeline.data.rows import read_rows, row_maker, with_known_labels
from pipeline.data.tables import stream
from pipeline.data.tasks import TASKS, TRANSFORMERS, Documents, Encoder, Row
from pipeline.errors import UserError
from pipeline.evaluation.attention_maps import attention_maps, draw_masks, labels
from pipeline.evaluation.predicting import Predictor
from pipeline.evaluation.ranking import BM25, Ranking, Vectors
from pipeline.files import described, read_json, replacing, write_json
from pipeline.model.generation import encode, generate
from pipeline.terminal import note, print_table, say, warn

CHUNK = 1024  # rows predicted before their results are written
RENAME = ": rename one as it was in training, or make rows with --function"
READ_TOKENS = 512  # of a text that is embedded by a bundle that was not fine-tuned; more are cut off


def write_on(config: GenerateConfig) -> list[str]:
    """Go on from a prompt, or with an encoder-decoder answer it as a source; the most probable text first.

    On a terminal, or where it is asked for, a single text is shown as it is written instead.
    """
    single = config.beams == config.sequences == 1
    if not (single and sys.stdout.isatty() if config.stream is None else config.stream):
        return load(config.bundle).generate(config.prompt, config)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    load(config.bundle).generate(config.prompt, config, show)
    show("\n")
    return []


def load(folder: str | Path) -> "Loaded":
    """A bundle ready to use from Python."""
    return Loaded(load_bundle(Path(folder)), Path(folder))


@dataclass(frozen=True)
class Loaded:
    """A bundle, and what it can do with texts."""

    bundle: Bundle
    folder: Path

    def classify(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """For each text the probability of every class."""
        predictor = self.of_kind("classification")
        found = predictor.predict([Row(text) for text in texts])
        return [dict(zip(predictor.encoder.labels, map(float, chances), strict=True)) for chances in found]

    def translate(self, texts: Sequence[str]) -> list[str]:
        """What the model writes for each text."""
        return self.of_kind("text").predict([Row(text) for text in texts])

    summarize = translate

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> Vectors:
        """For each text a vector of length 1, by any transformer; the dot product of two is their similarity."""
        return self.embedder(batch_size).embed(texts)

    def search(self, query: str, corpus: str | Path | Sequence[str] | Documents, top: int = 10) -> Ranking:
        """The ids and scores of the documents nearest to a query; the corpus is a folder (see BEIR) or a list of texts,
        called by their numbers."""
        if isinstance(corpus, str | Path):
            corpus = read_documents(Path(corpus), skip=False)
        elif not isinstance(corpus, Documents):
            corpus = Documents.of({str(number): text for number, text in enumerate(corpus)})
        predictor = self.embedder()
        return predictor.index(corpus).search(predictor.embed([query]), top)[0]

    def generate(
        self, prompt: str, settings: GenerationConfig | None = None, show: Callable[[str], None] | None = None
    ) -> list[str]:
        """Go on from a prompt, or with an encoder-decoder answer it as a source; the most probable text first.

        `show` is called with each piece of a single text as soon as it is written.
        """
        model, tokenizer = self.bundle.model, self.bundle.tokenizer
        settings, end = settings or GenerationConfig(), tokenizer.id("end")
        ids = special_encode(self.bundle, prompt)
        if model.architecture.family == "encoder":
            raise UserError(f"{self.folder}: an encoder cannot write; use a decoder or an encoder-decoder")
        answers = model.architecture.family == "encoder-decoder"
        memory = encode(model, [[*ids, end]]) if answers else None
        first = [tokenizer.first] if answers else [tokenizer.first, *ids]

        read = tokenizer.decode(ids)

        def text_of(written: Sequence[int]) -> str:
            if answers:
                return tokenizer.decode(written, skip_special=False)
            whole = tokenizer.decode([*ids, *written])  # whether a blank parts it from the prompt, only both tell
            return prompt + (whole.removeprefix(read) if whole.startswith(read) else tokenizer.decode(written))

        pieces = Pieces(text_of, show) if show else None
        found = generate(model, [first], settings, end=end, memory=memory, watch=pieces)
        texts = [text_of(one.ids) for one in found[0]]
        if pieces:
            pieces.tell(texts[0])
        return texts

    def of_kind(self, kind: str) -> Predictor:
        predictor = self.predictor()
        task = predictor.encoder.task.name
        if TASKS[task].kind != kind:
            raise UserError(f"{self.folder}: fine-tuned for {task}, which is no {kind} task")
        return predictor

    def predictor(self, batch_size: int = 32, answers: AnswerConfig | None = None) -> Predictor:
        """What does the task that the bundle was fine-tuned for."""
        meta = self.bundle.meta
        if "task" not in meta:
            raise UserError(f"{self.folder}: pretrained, not fine-tuned for a task; use `triptych finetune` first")
        written = (answers or AnswerConfig()).over(GenerationConfig(**meta["generation"]))
        return Predictor(self.bundle.model, encoder_of(self.bundle), meta["pooling"], written, batch_size)

    def embedder(self, batch_size: int = 32) -> Predictor:
        """What embeds texts: as fine-tuned for it, else by the mean of states."""
        bundle, model = self.bundle, self.bundle.model
        if bundle.meta.get("task", {}).get("name") == "retrieval":
            return self.predictor(batch_size)
        if model.architecture.family not in TRANSFORMERS:
            raise UserError(f"{self.folder}: a recurrent model makes no embeddings; use {' or '.join(TRANSFORMERS)}")
        limit = model.architecture.longest or READ_TOKENS + 2
        encoder = Encoder(
            TaskConfig(name="retrieval"), model.architecture, bundle.tokenizer, [], min(READ_TOKENS, limit - 2), 0
        )
        return Predictor(model, encoder, "mean", GenerationConfig(), batch_size)


def encoder_of(bundle: Bundle) -> Encoder:
    """What turns rows into examples as it did when a bundle was fine-tuned."""
    task = TaskConfig(**bundle.meta["task"] | {"function": None})  # code is run only if the user names it here and now
    facts = [bundle.meta[name] for name in ("labels", "source_length", "target_length")]
    return Encoder(task, bundle.model.architecture, bundle.tokenizer, *facts)


class Pieces:
    """Shows the text of tokens as they come; a character that needs several waits for the last of them."""

    def __init__(self, text_of: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self.text_of, self.show = text_of, show
        self.ids: list[int] = []
        self.told = ""
        self.tell(text_of([]))

    def __call__(self, token: int) -> None:
        self.ids.append(token)
        text = self.text_of(self.ids)
        if not text.endswith("\ufffd"):
            self.tell(text)

    def tell(self, text: str) -> None:
        self.show(text.removeprefix(self.told))
        self.told = text


def evaluate(config: EvaluateConfig) -> None:
    """Print the metrics of a bundle on rows, and write them as JSON if asked to."""
    predictor = load(config.bundle).predictor(config.batch_size, config.generation)
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
    rows = list(read_queries(file, "test", skip).values()) if retrieval else read_rows(file, task, skip, RENAME)
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
    blank = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{place} line {number}: not UTF-8; convert it first") from error
        blank += not text.strip()
        if text.strip():
            yield Row(text)
    if blank:
        note(f"{place}: {blank:,} blank lines passed over")


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
    done = pass_over(path, rows)
    if done and record.is_file() and read_json(record) != made_by:
        raise UserError(f"{path}: holds results of another model or settings; choose another --output or delete it")
    if done:
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


def draw_attention(config: AttentionConfig) -> list[Path]:
    """Draw where a model looks while it reads a text, and where its decoder looks while it reads a target."""
    bundle = load_bundle(Path(config.bundle))
    model, tokenizer = bundle.model, bundle.tokenizer
    read = special_encode(bundle, config.text)
    target = None if config.target is None else [tokenizer.first, *special_encode(bundle, config.target)]
    if model.architecture.family == "decoder":
        if target is not None:
            raise UserError("target: a decoder reads one text; only an encoder-decoder has a target")
        source, target = None, [tokenizer.first, *read]
    elif model.architecture.family == "encoder" and (first := tokenizer.find("class")) is not None:
        source = [first, *read]
    else:
        source = read
    prefix = len(target) if target and source is None and model.architecture.prefix_attention == "bidirectional" else 0
    maps = attention_maps(model, tokenizer, source, target, Path(config.output), config.layer, config.head, prefix)
    return [*maps, draw_masks(labels(tokenizer, read), Path(config.output) / "masks.png")]


def special_encode(bundle: Bundle, text: str) -> list[int]:
    """The ids of a text in which special tokens, such as the mask and the sentinels, may be written out."""
    tokenizer = bundle.tokenizer
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, tokenizer.special)) + ")", text):
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids
