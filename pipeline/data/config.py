"""What can be set about corpora, tokenizers, stores, objectives and tasks. Light: for the command line, never torch."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.errors import UserError
from pipeline.model.config import Family

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "character", "byte"]
Split = Literal["train", "validation", "test"]
TaskName = Literal[
    "sentiment", "classification", "summarization", "translation", "text", "retrieval", "reversal", "case"
]
Objective = Literal["masked", "causal", "span", "prefix", "hybrid"]

# What each family can be trained with; first what it is known for.
OBJECTIVES: dict[Family, tuple[Objective, ...]] = {
    "encoder": ("masked",),
    "decoder": ("causal", "prefix", "masked", "hybrid"),
    "encoder-decoder": ("span", "prefix"),
    "recurrent": ("causal",),
}
LONGEST_SPAN = 10  # of unit span, as in SpanBERT


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, how to clean it, and which books to hold out."""

    corpus: list[str]
    """Files, folders or globs (.txt .gz .zip .jsonl .csv .tsv .parquet), names from `triptych data list`,
    or Hugging Face datasets: hf:NAME or hf:FOLDER, with ?split=…&config=…&revision=… where needed."""
    text_column: str = "text"
    """The column that holds the text, for tables and datasets."""
    streaming: bool = False
    """Read Hugging Face datasets while they download instead of storing them first."""
    limit: int | None = None
    """Read at most this many documents."""
    clean: bool = True
    """Remove Project Gutenberg notices, join hard-wrapped lines, drop control characters."""
    deduplicate: bool = True
    """Drop copies and near-copies of a document and repeated long passages."""
    validation_fraction: float = 0.05
    """The share of documents held out for validation, by the hash of their text."""
    test_fraction: float = 0.0
    """The share of documents held out for test, by the hash of their text."""
    validation_books: list[str] = field(default_factory=list)
    """Globs of document names: these, instead of a fraction, are held out for validation."""
    test_books: list[str] = field(default_factory=list)
    """Globs of document names: these, instead of a fraction, are held out for test."""
    workers: int = 0
    """Processes that read and tokenise; 0 means one per core."""

    def __post_init__(self) -> None:
        if not self.corpus:
            raise UserError("corpus: nothing to read; name at least one file, folder or catalogue entry")
        if min(self.validation_fraction, self.test_fraction) < 0:
            raise UserError("validation_fraction and test_fraction: must not be negative")
        if self.validation_fraction + self.test_fraction >= 1:
            raise UserError("validation_fraction + test_fraction: must leave something to train on (below 1)")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit: {self.limit} documents leave nothing to read; use a positive number")
        if self.workers < 0:
            raise UserError(f"workers: {self.workers} is negative; use 0 for one per core")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How a tokenizer is trained."""

    kind: TokenizerKind = "bpe"
    """Byte-level BPE, byte-level Unigram, WordPiece, one token a character, or one a byte."""
    vocab_size: int = 8192
    """How many tokens, special ones included (byte: fixed; character: at most)."""
    min_frequency: int = 2
    """A merge or character must occur this often."""
    normalise: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalisation before anything else; none keeps the text as it is."""
    lowercase: bool = False
    """Lower-case everything."""
    digits: Literal["together", "single"] = "together"
    """Keep runs of digits in one word, or make each digit a token."""
    tags: list[str] = field(default_factory=lambda: ["<U>", "<L>", "<en>", "<de>", "<fr>", "<cs>"])
    """Language and task tags: special tokens after the fixed ones, in this order."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """How a window of tokens becomes what a model reads and what it is to predict."""

    name: Objective | None = None
    """Predict masked tokens, each next token, spans that were cut out, what follows a prefix, or (hybrid) masked tokens
    in some sequences and each next in others; null: encoder masked, decoder causal, encoder-decoder span."""
    rate: float = 0.15
    """The share of tokens that are masked or cut out."""
    final_rate: float | None = None
    """The rate at the end of the run, to which it goes in a straight line; null keeps it."""
    mask_share: float = 0.8
    """Of the tokens to predict by masked, the share replaced by the mask token."""
    random_share: float = 0.1
    """Of the tokens to predict by masked, the share replaced by random tokens; the rest stays as it is."""
    unit: Literal["token", "word", "span"] = "token"
    """What masked masks together: single tokens, whole words, or spans of up to 10 tokens."""
    span_length: float = 3.0
    """The mean length of spans, cut out (span) or masked (unit span)."""
    causal_share: float = 0.5
    """Of the sequences of hybrid, the share trained to predict each next token."""
    schedule: dict[str, float] = field(default_factory=dict)
    """Objectives in order with their shares of the run, such as {causal: 0.25, masked: 0.75}; replaces name."""

    def __post_init__(self) -> None:
        for name in ("rate", "final_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise UserError(f"objective.{name}: {value} must be above 0 and below 1")
        for name in ("mask_share", "random_share", "causal_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"objective.{name}: {getattr(self, name)} must be from 0 to 1")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError("objective.mask_share: together with random_share it must not be above 1")
        if not 1 <= self.span_length < math.inf:
            raise UserError(f"objective.span_length: {self.span_length} must be at least 1")
        if self.unit == "span" and self.span_length > (1 + LONGEST_SPAN) / 2:
            raise UserError(f"objective.span_length: {self.span_length} is too long for unit span; use 5.5 or less")
        for name, share in self.schedule.items():
            if name not in get_args(Objective):
                raise UserError(f"objective.schedule: {name} is no objective; use {', '.join(get_args(Objective))}")
            if not 0 < share <= 1:
                raise UserError(f"objective.schedule: the share {share} of {name} must be above 0 and at most 1")
        if self.schedule and not math.isclose(sum(self.schedule.values()), 1, abs_tol=1e-6):
            raise UserError(f"objective.schedule: shares add up to {sum(self.schedule.values()):g}; make it 1")

    def names(self, family: Family) -> list[str]:
        """The objectives of a run, in order."""
        return list(self.schedule) or [self.name or OBJECTIVES[family][0]]


def check_objective(config: ObjectiveConfig, family: Family) -> None:
    """Refuse, in one line, an objective that a family cannot be trained with."""
    known = OBJECTIVES[family]
    for name in config.names(family):
        if name not in known:
            key = "schedule" if config.schedule else "name"
            raise UserError(f"objective.{key}: family {family} cannot be trained with {name}; use {' or '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is to be learnt from rows of text."""

    name: TaskName
    """Classes of any kind (sentiment, classification), text to text judged by ROUGE (summarization), by BLEU
    (translation) or to the letter (text), documents that answer a query (retrieval), or made-up strings to reverse
    or to change the case of."""
    function: str | None = None
    """Your own Python, FILE.py:NAME: a function from a row of the table (a dict) to a dict of source, and target or
    label."""
    source_column: str | None = None
    """The column to read from; by default text, document, en or source."""
    target_column: str | None = None
    """The column to write; by default summary, de or target."""
    label_column: str | None = None
    """The column of the class; by default label."""
    references_column: str | None = None
    """A column with a list of all good answers; by default refs, where there is one."""
    tag: str | None = None
    """A token of the tokenizer that a decoder begins with, such as <de> for the language to translate into."""
    class_weights: bool = False
    """Let rare classes count as much as common ones."""
    label_smoothing: float = 0.0
    """Spread this share of each target over the vocabulary or the classes."""
    temperature: float = 0.05
    """What similarities are divided by before they become the loss of retrieval; the lower, the sharper."""
    examples: int = 20_000
    """How many training rows are made up (reversal, case)."""
    shortest: int = 1
    """The length of the shortest made-up string."""
    longest: int = 20
    """The length of the longest made-up string."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"task.label_smoothing: {self.label_smoothing} must be from 0 up to 1")
        if self.label_smoothing and self.name == "retrieval":
            raise UserError("task.label_smoothing: retrieval has no classes to spread over; leave it out")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"task.temperature: {self.temperature} must be above 0")
        if self.function is not None and (self.name in ("retrieval", "reversal", "case") or ":" not in self.function):
            raise UserError("task.function: FILE.py:NAME, for tasks whose rows come from a table")
        if not 1 <= self.shortest <= self.longest or self.examples < 10:
            raise UserError("task: shortest must be from 1 to longest, and examples at least 10")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The tokenizer of a run, and its batches."""

    tokenizer: str | None = None
    """The folder of a tokenizer, for models that start from scratch; else one is trained on the training text."""
    new_tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How a tokenizer is trained if none is named."""
    batch_size: int = 32
    """Windows, or rows of a task, for each optimizer step, over all devices."""
    micro_batch_size: int | None = None
    """Windows or rows that one device computes at a time: fewer take less memory, and the gradient stays the same but
    for retrieval, whose negatives are the others; by default its whole share of the batch."""
    loader_workers: int = 0
    """Processes that make batches; 0 makes them where the model trains."""

    def __post_init__(self) -> None:
        for name in ("limit", "sequence_length", "target_length", "batch_size", "batch_tokens", "micro_batch_size"):
            if (value := getattr(self, name, None)) is not None and value < 1:
                raise UserError(f"data.{name}: {value} must be at least 1")
        if self.loader_workers < 0:
            raise UserError(f"data.loader_workers: {self.loader_workers} must not be negative")


@dataclass(frozen=True, kw_only=True)
class TaskRowsConfig:
    """The rows of a task."""

    train: str | None = None
    """A table (.jsonl .csv .tsv .parquet), hf:NAME, a name from `triptych data list`, which has all splits, or for
    retrieval a folder in the layout of BEIR: corpus.jsonl, queries.jsonl, qrels.tsv or qrels/{train,dev,test}.tsv."""
    validation: str | None = None
    """Rows to choose the best checkpoint by; if there are none, a tenth of train, or a fifth of its queries."""
    test: str | None = None
    """Rows for the final score."""
    limit: int | None = None
    """Train on so many rows, drawn by the seed."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a row that is missing a column, is empty or has the wrong type."""


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig(BatchConfig, TaskRowsConfig):
    """The rows of a task, and how they become batches."""

    sequence_length: int = 256
    """The most tokens of a source; more are cut off at its end."""
    target_length: int = 64
    """The most tokens of a target, its end included."""
    batch_tokens: int | None = None
    """Instead of batch_size: as many rows of similar length as have so many tokens, padding included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens is not None and self.micro_batch_size is not None:
            raise UserError("data.micro_batch_size: batches by tokens have no fixed number of rows; leave it out")


@dataclass(frozen=True, kw_only=True)
class DataListConfig:
    """List the catalogue of real corpora and task sets."""


@dataclass(frozen=True, kw_only=True)
class DataGetConfig:
    """Fetch a catalogue entry, verify it and print where it is."""

    name: str
    """A name from `triptych data list`."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig(CorpusConfig):
    """Show what is in a corpus and what would be cleaned, dropped and held out."""


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainConfig(TokenizerConfig, CorpusConfig):
    """Train a tokenizer on the training part of a corpus."""

    output: str
    """Where the tokenizer goes, for example tokenizers/novels."""


@dataclass(frozen=True, kw_only=True)
class TokenizerCompareConfig:
    """Compare tokenizers on one text."""

    tokenizers: list[str]
    """Folders of tokenizers."""
    text: list[str]
    """Files, folders or anything else a corpus can be; best a text that none of them was trained on."""
    text_column: str = "text"
    """The column that holds the text, for tables and datasets."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(CorpusConfig):
    """Turn a corpus into a token store."""

    tokenizer: str
    """The folder of a tokenizer."""
    output: str
    """The folder in which the store gets a folder of its own, named by what it holds."""
