"""What can be set about using a bundle. Light: imported by the command line, never torch."""

from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a model writes on: the most probable token each time, tokens drawn at random, or beam search."""

    max_new_tokens: int = 64
    """Stop after this many tokens."""
    min_new_tokens: int = 0
    """Do not end before this many tokens."""
    temperature: float = 0.0
    """Draw tokens at random, more boldly the higher this is; 0 takes the most probable."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0 is from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that together are this probable; 1 is from all."""
    beams: int = 1
    """Follow this many sequences and keep the most probable; 1 is no beam search."""
    length_penalty: float = 1.0
    """Divide the log-probability of a sequence by its length to this power; more favours longer ones."""
    no_repeat_ngram: int = 0
    """Write no sequence of this many tokens twice, nor one of the prompt's, but any of a task's source; 0 allows it."""
    sequences: int = 1
    """How many sequences to return for each prompt, the most probable first."""
    seed: int = 0
    """What is drawn at random follows from this and the number of the prompt."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams", "sequences"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("min_new_tokens", "temperature", "top_k", "no_repeat_ngram", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}: {getattr(self, name)} must not be negative")
        if not abs(self.length_penalty) <= 100:
            raise UserError(f"length_penalty: {self.length_penalty} must be from -100 to 100")
        if self.seed >= 2**63:
            raise UserError(f"seed: {self.seed} must be below 2**63")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(f"min_new_tokens: {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} must be above 0 and at most 1")
        if self.temperature and self.beams > 1:
            raise UserError("temperature: beam search draws nothing at random; use temperature 0 or 1 beam")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError("top_k and top_p: need a temperature above 0; without one nothing is drawn at random")
        if not self.temperature and self.sequences > self.beams:
            raise UserError(f"sequences: {self.sequences} need as many beams, or a temperature above 0")


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Make a bundle of a model of transformers (BERT, GPT-2, T5, Llama, Qwen3, Apertus)."""

    source: str
    """A folder with config.json, safetensors and tokenizer.json, or hf:NAME for the hub."""
    bundle: str
    """Where the bundle goes."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a bundle as a folder that transformers loads."""

    bundle: str
    """The folder of a bundle."""
    folder: str
    """Where the files for transformers go."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(GenerationConfig):
    """Let a bundle write on from a prompt, or answer a source."""

    bundle: str
    """The folder of a bundle."""
    prompt: str
    """The text to go on from, or the source of an encoder-decoder; <extra_id_0> and the like are special tokens."""
    stream: bool | None = None
    """Show a single text as it is written; by default on a terminal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream and (self.beams > 1 or self.sequences > 1):
            raise UserError("stream: only a single text without beams can be shown as it is written")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Draw where every layer and head of a bundle looks while it reads a text."""

    bundle: str
    """The folder of a bundle."""
    text: str
    """What is read; special tokens such as <mask> count as such."""
    target: str | None = None
    """What the decoder of an encoder-decoder reads."""
    layer: int | None = None
    """Draw this layer alone, the first being 1."""
    head: int | None = None
    """Draw this head alone, the first being 1; together with a layer, and if it is short, with its numbers."""
    output: str
    """The folder for the pictures: one of each kind of attention, layers by heads, and one of the masks there are."""

    def __post_init__(self) -> None:
        for name in ("layer", "head"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)}, but the first is 1")


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How answers are written; what is not named is as in training."""

    max_new_tokens: int | None = None
    """Stop after this many tokens."""
    min_new_tokens: int | None = None
    """Do not end before this many tokens."""
    beams: int | None = None
    """Follow this many sequences and keep the most probable; 1 is no beam search."""
    length_penalty: float | None = None
    """Divide the log-probability of a sequence by its length to this power; more favours longer ones."""
    no_repeat_ngram: int | None = None
    """Write no sequence of this many tokens twice; 0 allows it."""

    def __post_init__(self) -> None:
        least = max(1, self.min_new_tokens or 1)  # what the training set is not known here
        self.over(GenerationConfig(max_new_tokens=least))

    def over(self, trained: GenerationConfig) -> GenerationConfig:
        """As in training, but for what is named here; only the best answer counts."""
        named = {key: value for key, value in asdict(self).items() if value is not None}
        return replace(trained, sequences=1, **named)


@dataclass(frozen=True, kw_only=True)
class BundleRowsConfig:
    """A bundle, and how it reads rows."""

    bundle: str
    """The folder of a bundle."""
    batch_size: int = 32
    """Rows at a time; the result does not depend on it."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a row that is missing a column, is empty or has the wrong type."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size: {self.batch_size} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(BundleRowsConfig):
    """Measure a fine-tuned bundle on rows."""

    data: str
    """A table of rows, hf:NAME, or a name from `triptych data list` (its test rows, or dev where they are secret); for
    retrieval a folder in the layout of BEIR, or one of its files of judgements."""
    json: str | None = None
    """Where metrics, signatures, data and bundle are written."""
    generation: AnswerConfig = field(default_factory=AnswerConfig)
    """How answers are written; what is not named is as in training."""
    function: str | None = None
    """Your own Python, FILE.py:NAME, that makes rows of this table as in training; a bundle cannot name any."""


@dataclass(frozen=True, kw_only=True)
class TextsConfig(BundleRowsConfig):
    """A bundle, and where texts for it come from."""

    texts: list[str] = field(default_factory=list)
    """The texts; standard input, a line each, if there are none and no --input."""
    input: str | None = None
    """A table of rows (.jsonl .csv .tsv .parquet), hf:NAME, or a .txt with a text on each line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.texts and self.input is not None:
            raise UserError(f"input: {self.input} would not be read beside texts that are typed; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(TextsConfig):
    """Let a fine-tuned bundle do its task on texts."""

    output: str | None = None
    """A .jsonl file for the results, which goes on where it was interrupted; standard output by default."""
    corpus: str | None = None
    """For retrieval: a folder with the documents to find, in its corpus.jsonl."""
    top: int = 10
    """For retrieval: how many documents to return for each query, at most 100."""
    function: str | None = None
    """Your own Python, FILE.py:NAME, that makes rows of --input as in training; a bundle cannot name any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top <= 100:
            raise UserError(f"top: {self.top} must be from 1 to 100")
        if self.function is not None and (self.input or ".txt").endswith(".txt"):
            raise UserError("function: makes rows of a table; name one by --input, or leave it out")


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(TextsConfig):
    """Turn texts into vectors with any transformer, fine-tuned or not."""

    column: str = "text"
    """The column of the table that holds the text."""
    output: str
    """A .npy file for the matrix, one row of length 1 for each text, in their order."""
