"""Using a bundle: its task on texts, what it writes, where it looks."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle import Bundle, load_bundle
from pipeline.config import AnswerConfig, AttentionConfig, GenerateConfig, GenerationConfig
from pipeline.data.config import TaskConfig
from pipeline.data.retrieval import read_documents
from pipeline.data.tasks import TASKS, TRANSFORMERS, Documents, Encoder, Row
from pipeline.errors import UserError
from pipeline.evaluation.attention_maps import attention_maps, draw_masks, labels
from pipeline.evaluation.predicting import Predictor
from pipeline.evaluation.ranking import Ranking, Vectors
from pipeline.model.generation import encode, generate

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

        last = ids[-16:]  # more cannot decide how the next token is written
        read = tokenizer.decode(last)

        def text_of(written: Sequence[int]) -> str:
            if answers:
                return tokenizer.decode(written, skip_special=False)
            whole = tokenizer.decode([*last, *written])  # whether a blank parts it from the prompt, only both tell
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
        length = min(READ_TOKENS, (model.architecture.longest or READ_TOKENS + 2) - 2)
        encoder = Encoder(TaskConfig(name="retrieval"), model.architecture, bundle.tokenizer, [], length, 0)
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


def draw_attention(config: AttentionConfig) -> list[Path]:
    """Draw where a model looks while it reads a text, and where its decoder looks while it reads a target."""
    bundle = load_bundle(Path(config.bundle))
    model, tokenizer = bundle.model, bundle.tokenizer
    family = model.architecture.family
    if config.target is not None and family in ("encoder", "decoder"):
        raise UserError(f"target: a model of family {family} reads one text; only an encoder-decoder has a target")
    read = special_encode(bundle, config.text)
    target = None if config.target is None else [tokenizer.first, *special_encode(bundle, config.target)]
    if family == "decoder":
        source, target = None, [tokenizer.first, *read]
    elif family == "encoder" and (first := tokenizer.find("class")) is not None:
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
