"""Objectives: how a window of tokens becomes what a model reads and what it is to predict. Pure functions.

In every shape T is the length of the window; begin, class and end tokens come on top of it.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import cast
from unicodedata import category

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from pipeline.data.config import LONGEST_SPAN, OBJECTIVES, Objective, ObjectiveConfig, check_objective
from pipeline.data.shard import Ids, Integers
from pipeline.errors import UserError
from pipeline.model.config import Family
from pipeline.tokenizer import Tokenizer
from pipeline.vocabulary import CONTINUED

Booleans = npt.NDArray[np.bool_]

IGNORED = -100  # the target where there is no loss; what torch ignores by default


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a model reads and is to predict, made from one window or one row of a task."""

    source: Integers | None = None
    """What the encoder reads."""
    inputs: Integers | None = None
    """What the decoder reads."""
    targets: Integers
    """What each position of the decoder, of the encoder where there is no decoder, predicts, or IGNORED."""
    prefix: int = 0
    """So many first positions of the decoder see each other in both directions."""
    tokens: int
    """Raw tokens of the window."""
    label: int | None = None
    """The class of the whole, or the number of the document of a query, where it has one; IGNORED if not known."""
    document: "Example | None" = None
    """The document that a query should find."""
    relevant: frozenset[int] = frozenset()
    """The numbers of all documents that answer a query."""


def make_example(
    ids: Ids | Integers,
    family: Family,
    objective: ObjectiveConfig,
    vocabulary: "Vocabulary",
    generator: Generator,
    split: int | None = None,
) -> Example:
    """Turn a window into an example, by the settings that `current` gives for a moment of the run.

    With `split`, causal and prefix predict the tokens from there on, given those before; prefix draws it otherwise.
    """
    assert not objective.schedule, "which objective of a schedule it is depends on the moment: see `current`"
    assert split is None or 0 <= split < len(ids), f"a split at {split} of {len(ids)} tokens"
    check_objective(objective, family)
    name = objective.name or OBJECTIVES[family][0]
    if name == "hybrid":
        name = "causal" if generator.random() < objective.causal_share else "masked"
    window = ids.astype(np.int64)
    if name == "masked":
        return mask_tokens(window, family, objective, vocabulary, generator)
    if name == "span":
        return cut_spans(window, objective, vocabulary, generator)
    if name == "prefix" and split is None:
        split = int(generator.integers(1, len(window))) if len(window) > 1 else 0
    if family == "encoder-decoder":
        return continue_source(window, split or 0, vocabulary)
    return continue_prefix(window, split or 0, name == "prefix", vocabulary)


def current(objective: ObjectiveConfig, progress: float) -> ObjectiveConfig:
    """The settings at a point of the run, from 0 at its beginning to 1 at its end."""
    name, rate = objective.name, objective.rate
    if objective.schedule:
        names = cast(list[Objective], list(objective.schedule))
        ends = list(accumulate(objective.schedule.values()))[:-1]
        name = names[bisect_right(ends, progress)]
    if objective.final_rate is not None:
        rate += (objective.final_rate - rate) * progress
    return replace(objective, name=name, rate=rate, final_rate=None, schedule={})


# --- The next token ----------------------------------------------------------------------------------------------


def continue_prefix(ids: Integers, split: int, both_ways: bool, vocabulary: "Vocabulary") -> Example:
    """For a decoder: predict each token from those before it, beginning with the token at `split`."""
    begin = needed(vocabulary.begin, "begin")
    return Example(
        inputs=np.concatenate([[begin], ids[:-1]]),
        targets=np.where(np.arange(len(ids)) < split, IGNORED, ids),
        prefix=split + 1 if both_ways else 0,  # the begin token and the tokens before the split
        tokens=len(ids),
    )


def continue_source(ids: Integers, split: int, vocabulary: "Vocabulary") -> Example:
    """For an encoder-decoder: read the tokens before the split, predict the rest one after another."""
    begin, end = needed(vocabulary.begin, "begin"), needed(vocabulary.end, "end")
    return Example(
        source=np.concatenate([ids[:split], [end]]),
        inputs=np.concatenate([[begin], ids[split:-1]]),
        targets=ids[split:],
        tokens=len(ids),
    )


# --- Masked tokens -----------------------------------------------------------------------------------------------


def mask_tokens(
    ids: Integers, family: Family, objective: ObjectiveConfig, vocabulary: "Vocabulary", generator: Generator
) -> Example:
    """Predict masked tokens: an encoder where they stand, a decoder one position before (GPT-BERT)."""
    mask = needed(vocabulary.mask, "mask")
    places = choose_places(ids, objective, vocabulary, generator)
    fates = generator.random(len(places))
    with_mask = fates < objective.mask_share
    with_random = ~with_mask & (fates < objective.mask_share + objective.random_share)
    masked, targets = ids.copy(), np.full_like(ids, IGNORED)
    masked[places[with_mask]] = mask
    masked[places[with_random]] = generator.choice(vocabulary.ordinary, with_random.sum())
    targets[places] = ids[places]
    if family == "encoder":
        first = needed(vocabulary.class_, "class")
        read, predicted = np.concatenate([[first], masked]), np.concatenate([[IGNORED], targets])
        return Example(source=read, targets=predicted, tokens=len(ids))
    first = needed(vocabulary.begin, "begin")
    read, predicted = np.concatenate([[first], masked]), np.concatenate([targets, [IGNORED]])
    return Example(inputs=read, targets=predicted, prefix=len(read), tokens=len(ids))


def choose_places(
    ids: Integers, objective: ObjectiveConfig, vocabulary: "Vocabulary", generator: Generator
) -> Integers:
    """Draw units at random until the rate is met, and say where their tokens stand; special tokens are in none."""
    maskable = np.flatnonzero(vocabulary.is_ordinary[ids])
    if not len(maskable):
        return maskable
    units = number_units(maskable, ids[maskable], objective, vocabulary, generator)
    order = generator.permutation(units[-1] + 1)
    tokens = np.cumsum(np.bincount(units)[order])
    budget = max(1, round(objective.rate * len(maskable)))
    chosen = np.zeros(len(order), np.bool_)
    chosen[order[: np.searchsorted(tokens, budget) + 1]] = True
    return maskable[chosen[units]]


def number_units(
    places: Integers, ids: Integers, objective: ObjectiveConfig, vocabulary: "Vocabulary", generator: Generator
) -> Integers:
    """The unit of each token, numbered from 0; what stands between tokens ends a unit."""
    if objective.unit == "token":
        return np.arange(len(ids))
    begins = np.diff(places, prepend=places[0]) > 1
    if objective.unit == "word":
        begins |= vocabulary.begins_word[ids] | np.append(False, vocabulary.ends_word[ids[:-1]])
    else:
        lengths = generator.choice(LONGEST_SPAN, len(ids), p=length_chances(objective.span_length)) + 1
        starts = np.cumsum(lengths)
        begins[starts[starts < len(ids)]] = True
    begins[0] = False  # unit 0 has begun
    return np.cumsum(begins)


@lru_cache
def length_chances(mean: float) -> npt.NDArray[np.float64]:
    """How likely each length of a span is: a geometric distribution cut off at the longest (SpanBERT), of this mean."""
    lengths = np.arange(1.0, LONGEST_SPAN + 1)
    chances = np.zeros(LONGEST_SPAN)
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: more than a float has bits
        ratio = (low + high) / 2
        chances = ratio**lengths / np.sum(ratio**lengths)
        low, high = (ratio, high) if lengths @ chances < mean else (low, ratio)
    return chances


# --- Spans -------------------------------------------------------------------------------------------------------


def cut_spans(ids: Integers, objective: ObjectiveConfig, vocabulary: "Vocabulary", generator: Generator) -> Example:
    """Predict spans that were cut out, each of which left a sentinel behind (T5).

    T5's counts are of ordinary tokens. A special token within a span stays and makes two spans of it; even so the
    source is never longer than the window and its end token.
    """
    begin, end = needed(vocabulary.begin, "begin"), needed(vocabulary.end, "end")
    if not vocabulary.sentinels:
        raise UserError("objective.name: span needs a tokenizer with sentinels (<extra_id_0>, …); use prefix")
    sentinels = np.array(vocabulary.sentinels)
    ordinary = vocabulary.is_ordinary[ids]
    counts = count_spans(int(ordinary.sum()), objective.rate, objective.span_length, len(sentinels))
    noise = np.zeros(len(ids), np.bool_)
    noise[ordinary] = draw_noise(int(ordinary.sum()), *counts, generator)
    starts = np.flatnonzero(noise & ~np.append(False, noise[:-1]))
    if len(starts) > len(sentinels):
        noise[starts[len(sentinels)] :] = False
    kept, cut = apart(ids, noise, sentinels)
    source, targets = np.append(kept, end), np.append(cut, end)
    if ordinary.all():
        lengths = span_lengths(len(ids), objective.rate, objective.span_length, len(sentinels))
        assert (len(source), len(targets)) == lengths, f"{len(source)} and {len(targets)}, not {lengths}"
    inputs = np.concatenate([[begin], targets[:-1]])
    if not noise.any():
        targets[:] = IGNORED  # nothing but the end: nothing to learn
    return Example(source=source, inputs=inputs, targets=targets, tokens=len(ids))


def span_lengths(raw: int, rate: float, mean: float, sentinels: int = 100) -> tuple[int, int]:
    """The lengths of source and targets made from so many raw tokens, each with its end token."""
    noise, spans = count_spans(raw, rate, mean, sentinels)
    return raw - noise + spans + 1, noise + spans + 1


def count_spans(length: int, rate: float, mean: float, sentinels: int) -> tuple[int, int]:
    """How many tokens are cut out, in how many spans; something always stays between them."""
    noise = max(0, min(max(round(length * rate), 1), length - 1))
    spans = min(max(round(noise / mean), 1), noise, length - noise, sentinels)
    return noise, spans


def draw_noise(length: int, noise: int, spans: int, generator: Generator) -> Booleans:
    """Draw which tokens are cut out: kept and cut pieces in turn, the first of them kept, as in T5."""
    if not spans:
        return np.zeros(length, np.bool_)
    pieces = [random_parts(length - noise, spans, generator), random_parts(noise, spans, generator)]
    return np.repeat(np.tile([False, True], spans), np.stack(pieces, axis=1).ravel())


def random_parts(total: int, parts: int, generator: Generator) -> Integers:
    """The sizes of so many parts of a total, none of them empty, all ways to cut it equally likely."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def apart(ids: Integers, noise: Booleans, sentinels: Integers) -> tuple[Integers, Integers]:
    """What is left with a sentinel for each span of noise, and the spans, each behind its sentinel."""
    starts = noise & ~np.append(False, noise[:-1])
    own = sentinels[: starts.sum()]
    left = ids.copy()
    left[starts] = own
    return left[~noise | starts], np.insert(ids[noise], np.flatnonzero(starts[noise]), own)


# --- The vocabulary ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What objectives need to know of a tokenizer; small, so that it travels to other processes."""

    begin: int | None
    """What a decoder reads first: the begin token, or padding where there is none, as in T5."""
    end: int | None
    class_: int | None
    mask: int | None
    sentinels: tuple[int, ...]
    is_ordinary: Booleans
    """By id: whether it is a token of text, not a special one."""
    begins_word: Booleans
    """By id: whether a word begins with it."""
    ends_word: Booleans
    """By id: whether a word begins after it, whatever follows."""
    ordinary: Integers
    """The ids of tokens of text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Ask a tokenizer."""
        is_ordinary, begins, ends = np.zeros((3, tokenizer.vocab_size), np.bool_)
        for token, number in tokenizer.backend.get_vocab().items():
            if token not in tokenizer.special:
                is_ordinary[number] = True
                begins[number], ends[number] = word_limits(tokenizer, token, number)
        begin = tokenizer.find("begin")
        return cls(
            begin=tokenizer.find("pad") if begin is None else begin,
            end=tokenizer.find("end"),
            class_=tokenizer.find("class"),
            mask=tokenizer.find("mask"),
            sentinels=tuple(tokenizer.sentinels),
            is_ordinary=is_ordinary,
            begins_word=begins,
            ends_word=ends,
            ordinary=np.flatnonzero(is_ordinary),
        )


def word_limits(tokenizer: Tokenizer, token: str, number: int) -> tuple[bool, bool]:
    """Whether a word begins with a token, and whether one begins after it.

    A space belongs to the word after it; newlines and punctuation are words of their own, but for apostrophes.
    """
    if tokenizer.kind == "wordpiece":
        return not token.startswith(CONTINUED), False
    text = tokenizer.decode([number]) if tokenizer.byte_level else token.replace("▁", " ")
    mark = text.strip(" ")
    alone = bool(mark) and all(
        char.isspace() or (category(char)[0] in "PS" and char not in "'’\ufffd") for char in mark
    )  # \ufffd: bytes of a character, mostly of a letter
    return alone or text.startswith(" "), alone


def needed(number: int | None, role: str) -> int:
    """The id of a special token without which an objective cannot do."""
    if number is None:
        raise UserError(f"objective.name: the tokenizer has no {role} token; use another objective or tokenizer")
    return number
