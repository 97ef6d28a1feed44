"""Ranking documents for queries: by the similarity of embeddings, or by the words they share (BM25).

Shapes: Q queries, D documents, C width.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from pipeline.data.tasks import Documents

Vectors = npt.NDArray[np.float32]
Ranking = list[tuple[str, float]]  # ids of documents and their scores, the best first
DEPTH = 100  # documents of a ranking that is measured
BLOCK = 256  # queries whose scores exist at the same time


@dataclass(frozen=True)
class Index:
    """Documents and their embeddings."""

    documents: Documents
    vectors_DC: Vectors

    def search(self, queries_QC: Vectors, depth: int = DEPTH) -> list[Ranking]:
        """For each query the documents nearest to it, by cosine: all vectors are of length 1."""
        blocks = (queries_QC[start : start + BLOCK] for start in range(0, len(queries_QC), BLOCK))
        return [ranked(self.documents, scores_D, depth) for block in blocks for scores_D in block @ self.vectors_DC.T]


def ranked(documents: Documents, scores_D: npt.NDArray[np.floating], depth: int) -> Ranking:
    """The best documents; of those that score the same the greatest id first, as in trec_eval."""
    place = max(0, len(scores_D) - depth)
    least = np.partition(scores_D, place)[place]
    chosen = np.flatnonzero(scores_D >= least)  # in the order of documents, which a stable sort keeps
    best = chosen[np.argsort(-scores_D[chosen], kind="stable")][:depth]
    names = list(documents.numbers)
    return [(names[number], float(scores_D[number])) for number in best]


class BM25:
    """Robertson's ranking by shared words, with Lucene's idf; k1 and b as Anserini has them, words without endings."""

    def __init__(self, documents: Documents, k1: float = 0.9, b: float = 0.4) -> None:
        self.documents = documents
        counts = [Counter(words(text)) for text in documents.texts.values()]
        sizes = np.array([count.total() for count in counts], np.float64)
        norms = k1 * (1 - b + b * sizes / max(sizes.mean(), 1.0))
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((number, times))
        self.weights: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
        for word, pairs in found.items():
            places, often = np.array(pairs).T
            rarity = math.log(1 + (len(counts) - len(places) + 0.5) / (len(places) + 0.5))
            self.weights[word] = (places, rarity * often / (often + norms[places]))

    def search(self, queries: Sequence[str], depth: int = DEPTH) -> list[Ranking]:
        """For each query the documents that share its rarest words most often."""
        return [ranked(self.documents, self.scores(query), depth) for query in queries]

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        scores_D = np.zeros(len(self.documents.texts))
        for word in words(query):
            if word in self.weights:
                places, weights = self.weights[word]
                scores_D[places] += weights
        return scores_D


def words(text: str) -> Iterator[str]:
    """The words of a text without their endings (Porter, 1980)."""
    return map(stemmer(), re.findall(r"\w+", text.lower()))


@cache
def stemmer() -> Callable[[str], str]:
    """Porter's, which remembers the words that it had."""
    from nltk.stem.porter import PorterStemmer  # takes a second to import

    return cache(PorterStemmer().stem)
