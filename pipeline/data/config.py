"""What can be set about corpora, tokenizers and stores. Light: imported by the command line, never torch."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import UserError

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "character", "byte"]
Split = Literal["train", "validation", "test"]


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
