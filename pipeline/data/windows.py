"""Windows: a stream of tokens cut into pieces of one length, each token once an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.data.shard import Ids, Integers, Stream


@dataclass(frozen=True)
class Window:
    """A piece of a stream."""

    ids: Ids
    documents: Integers | None = None
    """The document of each position, numbered from 0 in this window; attention can be kept inside each."""


class Windows:
    """A stream cut into windows of `length` tokens; the last, or the last of each document, is shorter.

    Windows run on from document to document, unless `within_documents` begins a new one with each. With
    `document_ids` every window says which of its tokens belong together.
    """

    def __init__(
        self, stream: Stream, length: int, *, within_documents: bool = False, document_ids: bool = False
    ) -> None:
        if length < 1:
            raise ValueError(f"windows of {length} tokens")
        self.stream = stream
        self.length = length
        self.document_ids = document_ids
        whole = np.array([0, len(stream)])
        self.bounds = stream.document_bounds() if within_documents or document_ids else whole
        self.pieces = self.bounds if within_documents else whole
        """What is cut: piece `p` is the tokens from bound `p` up to bound `p + 1`."""
        counts = -(-np.diff(self.pieces) // length)
        self.firsts = np.concatenate([[0], np.cumsum(counts)])
        """The number of the first window of each piece, and of all windows."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __iter__(self) -> Iterator[Window]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Window:
        start, stop = self.span(number)
        ids = self.stream.read(start, stop)
        if not self.document_ids:
            return Window(ids)
        documents = np.searchsorted(self.bounds, np.arange(start, stop), side="right")
        return Window(ids, documents - documents[0])

    def span(self, number: int) -> tuple[int, int]:
        """Where a window begins and ends in its stream."""
        if not 0 <= number < len(self):
            raise IndexError(f"window {number:,} of {len(self):,}")
        piece = int(np.searchsorted(self.firsts, number, side="right")) - 1
        start = int(self.pieces[piece]) + (number - int(self.firsts[piece])) * self.length
        return start, min(start + self.length, int(self.pieces[piece + 1]))


def epoch_order(count: int, seed: int, epoch: int) -> Integers:
    """The order in which an epoch visits `count` samples: a function of seed and epoch, of nothing else."""
    return np.random.default_rng((seed, epoch)).permutation(count)
