"""Tokenizers: trained on a stream of text, the same for the same text, known by their fingerprint."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pipeline import files
from pipeline.data.config import TokenizerConfig, TokenizerKind
from pipeline.errors import UserError
from pipeline.terminal import note
from pipeline.vocabulary import ALPHABET, CONTINUED, UNREACHABLE, learn

FORMAT = 1
# What a tokenizer's own record says; a bundle's record has it too, among much about its model.
FACTS = {
    "tokenizer_fingerprint", "corpus_fingerprint", "format", "library", "settings", "vocab_size", "bytes_per_token",
    "fertility", "unknown_share", "longest_tokens", "sample_tokens", "tokenizer_config.json",
}  # fmt: skip
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<sep>", "<cls>", "<mask>")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))

Role = Literal["pad", "unknown", "begin", "end", "separator", "class", "mask"]
# Our name first, then those of others, where one token may have several roles: GPT-2 has one in all.
NAMES: dict[Role, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unknown": ("<unk>", "[UNK]", "<|unk|>"),
    "begin": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "[CLS]"),
    "end": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
    "separator": ("<sep>", "[SEP]", "</s>"),
    "class": ("<cls>", "[CLS]", "<s>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}

# Parts of a text can be encoded alone: no word of our pre-tokenizers reaches into blanks from before or over a newline.
# A blank is what \s matches in the library, which unlike Python leaves out the separators 1c to 1f.
BLANK = r"[^\S\n\x1c-\x1f]"
PART = re.compile(rf"{BLANK}*[\S\x1c-\x1f]+|{BLANK}+|\n")
CUT = re.compile(r"(?<=\n)|(?<=\S)(?= )")
REMEMBERED = 2**18  # parts whose ids are kept: looking them up is several times as fast as asking the library
LONGEST = 32  # characters of a part that is kept; longer ones hardly come again, but would fill the memory
PIECE = 2**18  # characters encoded at a time


class Tokenizer:
    """Turns text into ids and ids into text."""

    def __init__(self, text: str, meta: dict[str, Any] | None = None) -> None:
        """Build from the text of a tokenizer.json, so that what was trained is what will be loaded."""
        content = json.loads(text)
        self.text = text
        self.fingerprint = files.fingerprint(content)
        self.meta: dict[str, Any] = {"tokenizer_fingerprint": self.fingerprint} if meta is None else meta
        self.backend = Backend.from_str(text)
        self.vocab_size = max(self.backend.get_vocab().values()) + 1
        added = sorted(self.backend.get_added_tokens_decoder().items())
        self.special = {token.content: number for number, token in added if token.special}
        self.sentinels = [self.special[name] for name in SENTINELS if name in self.special]
        self.byte_level = isinstance(self.backend.decoder, decoders.ByteLevel)
        self.kind = kind_of(self.backend, content)
        self.ours = content.get("pre_tokenizer") in our_pre_tokenizers()
        if not self.ours:
            self.backend = Backend.from_str(json.dumps(without_ways_to(self.special, self.kind, content)))
            self.backend.no_padding()
            self.backend.no_truncation()
        self.backend.encode_special_tokens = True  # "<mask>" in a text is text; a tokenizer.json cannot say so
        self.remembered_ids = lru_cache(REMEMBERED)(self.library_ids)

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Load a tokenizer of ours, that of a bundle, or the tokenizer.json of a Hugging Face folder."""
        path, meta_path = Path(folder) / "tokenizer.json", Path(folder) / "meta.json"
        if not path.is_file():
            raise UserError(f"{folder}: no tokenizer.json in it; make one with `triptych tokenizer train`")
        meta = files.read_json(meta_path) if meta_path.is_file() else None
        try:
            tokenizer = cls(path.read_text(encoding="utf-8"), meta)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path}: not a tokenizer ({error}); copy or train it again") from error
        if not isinstance(tokenizer.meta, dict) or tokenizer.meta.get("tokenizer_fingerprint") != tokenizer.fingerprint:
            raise UserError(f"{path}: not what {meta_path.name} beside it describes; copy or train both again")
        tokenizer.meta = {key: value for key, value in tokenizer.meta.items() if key in FACTS}
        return tokenizer

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json, then meta.json, which vouches for it."""
        files.write_text(Path(folder) / "tokenizer.json", self.text)
        files.write_json(Path(folder) / "meta.json", self.meta)

    def find(self, role: Role) -> int | None:
        """The id of the special token with this role, if there is one."""
        return next((self.special[name] for name in NAMES[role] if name in self.special), None)

    def id(self, role: Role) -> int:
        """The id of the special token with this role, which must be there."""
        if (number := self.find(role)) is None:
            names = ", ".join(NAMES[role])
            raise UserError(f"the tokenizer has no {role} token (none of {names}); use a tokenizer that has one")
        return number

    @property
    def first(self) -> int:
        """What a decoder reads first: the begin token, or padding where there is none, as in T5."""
        begin = self.find("begin")
        return self.id("pad") if begin is None else begin

    @property
    def pad(self) -> int:
        """What fills up sequences; where there is no padding anything does, since nothing looks at it."""
        return self.find("pad") or 0

    def tag(self, tag: str) -> int:
        """The id of a language or task tag, such as <de>."""
        if tag not in self.special:
            raise UserError(f"{tag}: the tokenizer has no such tag; train one with it among its `tags`")
        return self.special[tag]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces of moderate size whose ids, one after the other, are the ids of the text."""
        return pieces(text) if self.ours else iter([text])

    def encode(self, text: str) -> list[int]:
        """The ids of a text: no special ones but for what is unknown, whatever the text says."""
        if not self.ours:
            return self.library_ids(text)
        remembered, library = self.remembered_ids, self.library_ids
        parts = PART.findall(text)
        return list(chain.from_iterable([remembered(p) if len(p) <= LONGEST else library(p) for p in parts]))

    def library_ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids: to the letter for bpe, unigram and byte, with the usual spaces for wordpiece."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """The UTF-8 bytes each id stands for, 0 if special; for wordpiece without the blanks, which it drops."""
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, number in self.backend.get_vocab().items():
            if token not in self.special:
                sizes[number] = len(token) if self.byte_level else written_bytes(token, self.kind)
        return sizes


def train(texts: Iterable[str], config: TokenizerConfig, corpus_fingerprint: str | None = None) -> Tokenizer:
    """Train a tokenizer on texts that are read once; only what is distinct in them stays in memory."""
    special = special_tokens(config)
    backend = Backend(models.BPE())
    backend.normalizer = normalizer(config)
    backend.pre_tokenizer = pre_tokenizer(config.kind, config.digits)
    backend.decoder = decoder(config.kind)
    parts: Counter[str] = Counter()
    for text in texts:
        for piece in pieces(text):
            parts.update(PART.findall(piece))
    words = count_words(parts, backend)
    if not words:
        raise UserError("the training text is empty; name a corpus with text, or hold out less of it")
    note(f"tokenizer: learning from {len(words):,} distinct words, {sum(words.values()):,} in all")
    backend.model = learn(words, special, config)
    backend.add_special_tokens(special)
    tokenizer = Tokenizer(backend.to_str(pretty=True))
    described = describe(tokenizer, config, weigh(tokenizer, parts.items()))
    tokenizer.meta |= {"corpus_fingerprint": corpus_fingerprint, **described}
    if tokenizer.vocab_size < config.vocab_size and config.kind in ("bpe", "unigram", "wordpiece"):
        note(f"tokenizer: {tokenizer.vocab_size:,} tokens, not {config.vocab_size:,}: the text gives no more")
    return tokenizer


def count_words(parts: Mapping[str, int], backend: Backend) -> Counter[str]:
    """How often each word occurs, written as the model will see it."""
    words: Counter[str] = Counter()
    for part, count in parts.items():
        text = backend.normalizer.normalize_str(part) if backend.normalizer else part
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(text):
            words[word] += count
    return words


def pieces(text: str) -> Iterator[str]:
    """Cut a text before blanks that follow a word, or after newlines, where no word of ours goes on."""
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + PIECE)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop


@dataclass(frozen=True)
class Measure:
    """How a tokenizer does on a text."""

    tokens: int
    bytes_per_token: float
    fertility: float
    """Tokens for each word between blanks."""
    unknown_share: float


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Measure:
    """Measure a tokenizer on texts, best on some that it was not trained on."""
    return weigh(tokenizer, ((text, 1) for text in texts))


def weigh(tokenizer: Tokenizer, counted: Iterable[tuple[str, int]]) -> Measure:
    """Measure a tokenizer on texts each of which occurs a number of times."""
    size = words = tokens = unknown = 0
    unknown_id = tokenizer.find("unknown")
    for piece, count in ((piece, count) for text, count in counted for piece in tokenizer.pieces(text)):
        ids = tokenizer.encode(piece)
        size += count * len(piece.encode())
        words += count * len(piece.split())
        tokens += count * len(ids)
        unknown += count * sum(number == unknown_id for number in ids)
    return Measure(tokens, size / max(tokens, 1), tokens / max(words, 1), unknown / max(tokens, 1))


def describe(tokenizer: Tokenizer, config: TokenizerConfig, measured: Measure) -> dict[str, Any]:
    """What meta.json says about a trained tokenizer."""
    ordinary = range(len(tokenizer.special), tokenizer.vocab_size)
    tokens = [token for number in ordinary if "\ufffd" not in (token := tokenizer.decode([number]))]
    return {
        "format": FORMAT,
        "library": f"tokenizers {tokenizers.__version__}",
        "settings": settings_of(config),
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": round(measured.bytes_per_token, 4),
        "fertility": round(measured.fertility, 4),
        "unknown_share": round(measured.unknown_share, 6),
        "longest_tokens": sorted(tokens, key=len, reverse=True)[:20],
        "sample_tokens": tokens[:: len(tokens) // 50 + 1],
    }


def settings_of(config: TokenizerConfig) -> dict[str, Any]:
    """The settings that decide what a text teaches a tokenizer."""
    return {setting.name: getattr(config, setting.name) for setting in fields(TokenizerConfig)}


def is_learnt_from(folder: Path | str, text: str, config: TokenizerConfig) -> bool:
    """Whether a folder holds the tokenizer that these settings make of the text with this fingerprint."""
    if not (Path(folder) / "meta.json").is_file():
        return False
    meta = Tokenizer.load(folder).meta
    return (meta.get("corpus_fingerprint"), meta.get("settings")) == (text, settings_of(config))


# --- What tokenizers are made of ---------------------------------------------------------------------------------


def special_tokens(config: TokenizerConfig) -> list[str]:
    """The special tokens of a tokenizer in the order of their ids; fails if they or other settings make no sense."""
    special = [*SPECIAL, *SENTINELS, *config.tags]
    for tag in config.tags:
        if not re.fullmatch(r"<[A-Za-z][A-Za-z0-9_-]*>", tag):
            raise UserError(f"tags: {tag!r} is not a name in angle brackets; write it like <de>")
        if special.count(tag) > 1:
            raise UserError(f"tags: {tag} is there twice or a special token already; name it once")
    least = len(special) + (len(ALPHABET) if config.kind in ("bpe", "unigram") else 2)
    if config.vocab_size < least and config.kind != "byte":
        raise UserError(f"vocab_size: {config.vocab_size} is too small for kind {config.kind}; use {least} or more")
    if config.min_frequency < 1:
        raise UserError(f"min_frequency: {config.min_frequency} is too small; use 1 or more")
    return special


def normalizer(config: TokenizerConfig) -> normalizers.Normalizer | None:
    steps: list[normalizers.Normalizer] = []
    if config.normalise != "none":
        steps.append(normalizers.NFC() if config.normalise == "nfc" else normalizers.NFKC())
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps) if steps else None


def pre_tokenizer(kind: TokenizerKind, digits: str) -> pre_tokenizers.PreTokenizer:
    """Cut text into words: each newline is one, and all kinds but wordpiece keep a space with the word after it."""
    letters, other = r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\p{N}]"
    if kind == "wordpiece":
        number = r"\p{N}" if digits == "single" else r"\p{N}+"
        words = rf"{letters}(?:['’]{letters})*|{number}|{other}|\n"
        return pre_tokenizers.Split(Regex(words), "removed", invert=True)
    number = r"\p{N}" if digits == "single" else r" ?\p{N}+"
    ending = rf"['’](?i:s|t|re|ve|m|ll|d)(?!{letters})"
    words = rf" ?{letters}|{number}|{ending}| ?{other}+|\n|[^\S\n]+(?!\S)|[^\S\n]"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    if kind == "character":
        return split
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def our_pre_tokenizers() -> list[Any]:
    """Every pre-tokenizer of ours, as it stands in a tokenizer.json."""
    choices = [(kind, digits) for kind in get_args(TokenizerKind) for digits in ("together", "single")]
    return [json.loads(pre_tokenizer(kind, digits).__getstate__()) for kind, digits in choices]


def decoder(kind: TokenizerKind) -> decoders.Decoder:
    if kind == "wordpiece":
        needless = Regex(r" (?=[\n.,;:!?…’”)\]—])|(?<=[\n‘“(\[—]) ")
        steps = [decoders.WordPiece(CONTINUED, cleanup=False), decoders.Fuse(), decoders.Replace(needless, "")]
        return decoders.Sequence(steps)
    return decoders.Fuse() if kind == "character" else decoders.ByteLevel()


def kind_of(backend: Backend, content: Any) -> str:
    model = type(backend.model).__name__.lower()
    if model == "bpe" and not content["model"]["merges"]:
        return "byte" if isinstance(backend.decoder, decoders.ByteLevel) else "character"
    return model


def without_ways_to(special: Collection[str], kind: str, content: Any) -> Any:
    """A tokenizer.json from elsewhere in which no text scores or merges its way to a special token."""
    model = dict(content["model"])
    if kind == "unigram":  # T5's special tokens have the best score of all
        model["vocab"] = [[piece, UNREACHABLE if piece in special else score] for piece, score in model["vocab"]]
    if kind == "bpe":  # older conversions from SentencePiece have merges for <s>
        model["merges"] = [pair for pair in model["merges"] if "".join(pair).replace(" ", "") not in special]
    return content | {"model": model}


def written_bytes(token: str, kind: str) -> int:
    """The bytes of a token that is written in characters, without the marks of its kind."""
    if kind == "wordpiece":
        token = token.removeprefix(CONTINUED)
    elif kind != "character":  # from SentencePiece
        token = "." if re.fullmatch("<0x[0-9A-F]{2}>", token) else token.replace("▁", " ")
    return len(token.encode())
