"""Using a bundle: its task on texts, what it writes, where it looks."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from pipeline.bundle import Bundle, load_bundle
from pipeline.config import AttentionConfig, EvaluateConfig, GenerateConfig, GenerationConfig, PredictConfig
from pipeline.data import catalogue
from pipeline.data.config import TaskConfig, TaskDataConfig
from pipeline.data.rows import check_labels, read_rows, stream_rows
from pipeline.data.tasks import TASKS, Encoder, Row
from pipeline.errors import UserError
from pipeline.evaluation.attention_maps import attention_maps
from pipeline.evaluation.predicting import Predictor
from pipeline.files import write_json
from pipeline.model.generation import encode, generate
from pipeline.terminal import print_table, say

CHUNK = 1024  # rows predicted before their results are written


def write_on(config: GenerateConfig) -> list[str]:
    """Go on from a prompt, or with an encoder-decoder answer it as a source; the most probable text first."""
    return load(config.bundle).generate(config.prompt, config)


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

    def generate(self, prompt: str, settings: GenerationConfig | None = None) -> list[str]:
        """Go on from a prompt, or with an encoder-decoder answer it as a source; the most probable text first."""
        model, tokenizer = self.bundle.model, self.bundle.tokenizer
        settings, end = settings or GenerationConfig(), tokenizer.id("end")
        ids = special_encode(self.bundle, prompt)
        if model.architecture.family == "encoder":
            raise UserError(f"{self.folder}: an encoder cannot write; use a decoder or an encoder-decoder")
        if model.architecture.family == "encoder-decoder":
            memory = encode(model, [[*ids, end]])
            written = generate(model, [[tokenizer.first]], settings, end=end, memory=memory)
            return [tokenizer.decode(one.ids, skip_special=False) for one in written[0]]
        written = generate(model, [[tokenizer.first, *ids]], settings, end=end)
        return [prompt + tokenizer.decode(one.ids) for one in written[0]]

    def of_kind(self, kind: str) -> Predictor:
        predictor = self.predictor()
        task = predictor.encoder.task.name
        if TASKS[task].kind != kind:
            raise UserError(f"{self.folder}: fine-tuned for {task}, which is no {kind} task")
        return predictor

    def predictor(self, batch_size: int = 32, generation: GenerationConfig | None = None) -> Predictor:
        """What does the task that the bundle was fine-tuned for."""
        meta = self.bundle.meta
        if "task" not in meta:
            raise UserError(f"{self.folder}: pretrained, not fine-tuned for a task; use `triptych finetune` first")
        encoder = Encoder(
            TaskConfig(**meta["task"]),
            self.bundle.model.architecture,
            self.bundle.tokenizer,
            meta["labels"],
            meta["source_length"],
            meta["target_length"],
        )
        written = generation or GenerationConfig(**meta["generation"])
        return Predictor(self.bundle.model, encoder, meta["pooling"], written, batch_size)


def evaluate(config: EvaluateConfig) -> None:
    """Print the metrics of a bundle on rows, and write them as JSON if asked to."""
    predictor = load(config.bundle).predictor(config.batch_size, config.generation)
    file = config.data
    if file in catalogue.ENTRIES:
        folder = catalogue.get(file)
        found = [path for name in ("test", "dev") if (path := folder / f"{name}.jsonl").is_file()]
        if not found:
            raise UserError(f"data: {file} has no rows of a task; see `triptych data list`")
        file = str(found[0])
    rows = read_rows(file, predictor.encoder.task, TaskDataConfig(on_error=config.on_error))
    if predictor.encoder.labels:
        check_labels(rows, predictor.encoder.labels, file)
    if not rows:
        raise UserError(f"{file}: no rows to measure on")
    score = predictor.score(rows, predictor.predict(rows))
    print_table(f"{config.bundle} on {config.data}", ("metric", "value"), list(score.metrics.items()))
    for name, signature in score.signatures.items():
        say(f"{name}: {signature}")
    if config.json:
        written = {"metrics": score.metrics, "signatures": score.signatures, "data": file, "bundle": config.bundle}
        write_json(Path(config.json), written)


def predict(config: PredictConfig) -> None:
    """Write a JSON row for each text, a thousand at a time; an output that was interrupted goes on."""
    predictor = load(config.bundle).predictor(config.batch_size)
    rows = texts_to_predict(config, predictor)
    done = pass_over(Path(config.output), rows) if config.output else 0
    with ExitStack() as stack:
        out: TextIO = sys.stdout
        if config.output:
            out = stack.enter_context(Path(config.output).open("a", encoding="utf-8"))
        while chunk := list(islice(rows, CHUNK)):
            results = iter(predictor.predict([row for row in chunk if row is not None]))
            for number, row in enumerate(chunk, done):
                out.write(json.dumps(result_row(number, row, results, predictor), ensure_ascii=False) + "\n")
            out.flush()
            done += len(chunk)


def texts_to_predict(config: PredictConfig, predictor: Predictor) -> Iterator[Row | None]:
    """The texts that were typed, or those of a file or of standard input, one after the other."""
    if config.texts:
        return iter([Row(text) for text in config.texts])
    if config.input is None:
        return (Row(line.rstrip("\n")) for line in sys.stdin if line.strip())
    path = Path(config.input)
    if path.suffix == ".txt":
        return (Row(line.rstrip("\n")) for line in path.open(encoding="utf-8", errors="replace") if line.strip())
    return stream_rows(config.input, predictor.encoder.task, config.on_error == "skip", answers=False)


def result_row(number: int, row: Row | None, results: Iterator[Any], predictor: Predictor) -> dict[str, Any]:
    if row is None:
        return {"row": number, "error": "skipped"}
    result = next(results)
    if isinstance(result, str):
        return {"row": number, "source": row.source, "text": result}
    chances = dict(zip(predictor.encoder.labels, (round(float(chance), 6) for chance in result), strict=True))
    return {"row": number, "source": row.source, "label": max(chances, key=chances.__getitem__), "chances": chances}


def pass_over(path: Path, rows: Iterator[Row | None]) -> int:
    """Pass over the rows whose results a file has; a last result that was cut off is removed and made again."""
    done = end = 0
    if not path.is_file():
        return 0
    with path.open("r+b") as opened:
        for line in opened:
            if not line.endswith(b"\n"):
                break
            row = next(rows, None)
            if json.loads(line).get("source") != (row.source if row else None):
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
        return attention_maps(model, tokenizer, None, [tokenizer.first, *read], Path(config.output))
    if model.architecture.family == "encoder":
        first = tokenizer.find("class")
        read = read if first is None else [first, *read]
    return attention_maps(model, tokenizer, read, target, Path(config.output))


def special_encode(bundle: Bundle, text: str) -> list[int]:
    """The ids of a text in which special tokens, such as the mask and the sentinels, may be written out."""
    tokenizer = bundle.tokenizer
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, tokenizer.special)) + ")", text):
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids
