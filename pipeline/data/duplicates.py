"""Copies, editions and leaks: documents compared by samples of their eight-word sequences.

A sample keeps the sequences whose hash falls under a threshold (FracMinHash), so that samples of two documents can be
compared directly. It takes about one part in 90 of the text's size, one in 11 for documents under 4,096 words.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

SHINGLE_WORDS = 8
LONG_DOCUMENT_WORDS = 4096
LONG_THRESHOLD = 2**64 // 64
SHORT_THRESHOLD = 2**64 // 8
FEWEST_SHARED = 8  # fewer shared samples may be one common quotation
SAME_BOOK = 0.5  # editions of one novel share 0.6 and more; two novels of one author under 0.001
SAME_LENGTH = 0.8  # a book with and without its second part are not the same
PASSAGE_CHARACTERS = 200  # shorter lines repeat by chance: "Chapter I", "He said nothing."
LONGEST_KEPT = 64  # characters of a word whose hash is kept; a file without blanks is one word
WORD = re.compile(r"\w+")


class WordHashes(dict[str, int]):
    """A 64-bit hash of each word that does not change from run to run, computed once a word."""

    def __missing__(self, word: str) -> int:
        if len(self) > 500_000:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        if len(word) <= LONGEST_KEPT:
            self[word] = value
        return value


WORD_HASHES = WordHashes()


def sample(text: str) -> Hashes:
    """The sample of a text's eight-word sequences, sorted and without repeats."""
    found = [shingle_hashes(block) for block in blocks(text)]
    hashes = np.concatenate(found) if found else np.empty(0, np.uint64)
    threshold = LONG_THRESHOLD if hashes.size >= LONG_DOCUMENT_WORDS else SHORT_THRESHOLD
    return np.unique(hashes[hashes < np.uint64(threshold)])


def shingle_hashes(block: str) -> Hashes:
    words = np.fromiter((WORD_HASHES[word] for word in WORD.findall(block.lower())), np.uint64)
    count = words.size - SHINGLE_WORDS + 1
    if count < 1:
        return np.empty(0, np.uint64)
    mixed = np.zeros(count, np.uint64)
    for offset in range(SHINGLE_WORDS):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    mixed ^= mixed >> np.uint64(31)  # spread, so that a threshold is a fair draw
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(29))


def blocks(text: str, size: int = 2**20) -> Iterator[str]:
    """Pieces of about a million characters, cut at blanks, so that a huge document needs little memory."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            blank = re.compile(r"\s").search(text, end)
            end = blank.start() if blank else len(text)
        yield text[start:end]
        start = end


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two documents that share text; `first` comes first in the corpus."""

    first: int
    second: int
    same: bool
    """Editions of one book, rather than one that quotes or contains the other."""
    share: float
    """How much of the shorter stands in the longer."""


def overlaps(samples: Sequence[Hashes]) -> list[Overlap]:
    """All pairs of documents of which the shorter stands in the longer by half or more."""
    hashes, owners = stacked(samples)
    codes = []
    for lag in range(1, 64):  # a sequence in more documents than that is a formula, not a copy
        equal = hashes[lag:] == hashes[:-lag]
        if not equal.any():
            break
        codes.append(owners[:-lag][equal] * len(samples) + owners[lag:][equal])
    pairs, counts = np.unique(np.concatenate(codes), return_counts=True) if codes else ((), ())
    often = [int(code) for code, shared in zip(pairs, counts, strict=True) if shared >= FEWEST_SHARED]
    found = (compare(*divmod(code, len(samples)), samples) for code in often)
    return [overlap for overlap in found if overlap]


def compare(first: int, second: int, samples: Sequence[Hashes]) -> Overlap | None:
    """How much two documents share, both sampled at the threshold of the longer."""
    one, other = samples[first], samples[second]
    threshold = np.uint64(min(threshold_of(one), threshold_of(other)))
    one, other = one[one < threshold], other[other < threshold]
    shared = np.intersect1d(one, other, assume_unique=True).size
    share = shared / max(1, min(one.size, other.size))
    if shared < FEWEST_SHARED or share < SAME_BOOK:
        return None
    alike = min(one.size, other.size) >= SAME_LENGTH * max(one.size, other.size)
    same = alike and shared / (one.size + other.size - shared) >= SAME_BOOK
    return Overlap(first, second, same, share)


def threshold_of(hashes: Hashes) -> int:
    return SHORT_THRESHOLD if hashes.size and hashes[-1] >= LONG_THRESHOLD else LONG_THRESHOLD


def leak(held_out: Sequence[Hashes], training: Sequence[Hashes]) -> float | None:
    """The share of the sampled eight-word sequences of held-out documents that also stand in training, if any are."""
    asked, _ = stacked(held_out)
    asked = np.unique(asked[asked < np.uint64(LONG_THRESHOLD)])
    known = np.unique(stacked(training)[0])
    return float(np.isin(asked, known, assume_unique=True).mean()) if asked.size else None


def stacked(samples: Sequence[Hashes]) -> tuple[Hashes, NDArray[np.int64]]:
    """All hashes in order, each with the number of its document."""
    if not samples:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    hashes = np.concatenate(samples)
    owners = np.repeat(np.arange(len(samples), dtype=np.int64), [item.size for item in samples])
    order = np.lexsort((owners, hashes))
    return hashes[order], owners[order]


@dataclass(frozen=True, slots=True)
class Passages:
    """The long paragraphs of a document: where they stand, how long they are, and a hash of each."""

    lines: NDArray[np.uint32]
    bytes: NDArray[np.uint32]
    hashes: Hashes


NO_PASSAGES = Passages(np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.uint64))


def passages(text: str) -> Passages:
    """The paragraphs that are long enough to be recognised when they come again."""
    rows = [
        (number, len(data), int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))
        for number, line in enumerate(text.split("\n"))
        if len(line) >= PASSAGE_CHARACTERS and (data := line.strip().encode())
    ]
    if not rows:
        return NO_PASSAGES
    columns = list(zip(*rows, strict=True))
    return Passages(np.array(columns[0], np.uint32), np.array(columns[1], np.uint32), np.array(columns[2], np.uint64))


def repeated(found: Sequence[Passages]) -> list[tuple[tuple[int, ...], int]]:
    """For each document the lines that have stood before, in it or in an earlier one, and their bytes."""
    hashes = np.concatenate([item.hashes for item in found]) if found else np.empty(0, np.uint64)
    _, first = np.unique(hashes, return_index=True)
    again = np.ones(hashes.size, bool)
    again[first] = False
    result = []
    start = 0
    for item in found:
        mask = again[start : start + item.hashes.size]
        start += item.hashes.size
        removed = int(item.bytes[mask].sum()) + int(mask.sum())
        result.append((tuple(int(line) for line in item.lines[mask]), removed))
    return result
