"""Windows: a stream of tokens cut into pieces of one length, each token once an epoch."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from pipeline.data.shard import Ids, Integers, Stream


class Windows:
    """A stream cut into windows of `length` tokens; the last, or the last of each document, is shorter.

    Windows run on from document to document, unless `within_documents` begins a new one with each.
    """

    def __init__(self, stream: Stream, length: int, *, within_documents: bool = False) -> None:
        if length < 1:
            raise ValueError(f"windows of {length} tokens")
        self.stream = stream
        self.length = length
        self.pieces = stream.document_bounds() if within_documents else np.array([0, len(stream)])
        """What is cut: piece `p` is the tokens from bound `p` up to bound `p + 1`."""
        counts = -(-np.diff(self.pieces) // length)
        self.firsts = np.concatenate([[0], np.cumsum(counts)])
        """The number of the first window of each piece, and of all windows."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __iter__(self) -> Iterator[Ids]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Ids:
        return self.stream.read(*self.span(number))

    def documents(self, number: int) -> Integers:
        """The document of each position of a window, numbered from 0 in it; attention can be kept inside each."""
        places, bounds = np.arange(*self.span(number)), self.stream.document_bounds()
        return np.searchsorted(bounds, places, side="right") - np.searchsorted(bounds, places[:1], side="right")

    def span(self, number: int) -> tuple[int, int]:
        """Where a window begins and ends in its stream."""
        if not 0 <= number < len(self):
            raise IndexError(f"window {number:,} of {len(self):,}")
        piece = int(np.searchsorted(self.firsts, number, side="right")) - 1
        start = int(self.pieces[piece]) + (number - int(self.firsts[piece])) * self.length
        return start, min(start + self.length, int(self.pieces[piece + 1]))


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> Integers:
    """The order in which an epoch visits `count` samples: a function of seed and epoch, of nothing else."""
    return np.random.default_rng((seed, epoch)).permutation(count)
