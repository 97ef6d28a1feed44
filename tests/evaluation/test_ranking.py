"""Rankings: measured as trec_eval measures them, made by BM25 and by embeddings."""

import math

import numpy as np
import pytest

from pipeline.data.tasks import Documents
from pipeline.evaluation.metrics import score_rankings
from pipeline.evaluation.ranking import BM25, Index, ranked

# From trec_eval's own test (topics 301 to 303): which of the first 100 documents are relevant, how many are relevant
# in all, and what it prints for ndcg_cut_10, recip_rank (whose first 10 are enough, but for 303) and recall_100.
TOPICS = {
    "301": (
        "0000011000000001010100000100010100001010001000001000010110100010001001000000000000100000000100010001",
        474, (0.1518, 0.1667, 0.0485),
    ),
    "302": (
        "1101110110111111111011010011011001011010011100111110100101000000000000010000001001010000000000000000",
        77, (0.7530, 1.0000, 0.5455),
    ),
    "303": (
        "0000000000000000001000000000000000001000101100000000000000000000101000000000000000000000100000000010",
        10, (0.0000, 0.0000, 0.9000),
    ),
}  # fmt: skip


def test_measures_are_those_of_trec_eval() -> None:
    found, judged = [], []
    for topic, (relevant, total, expected) in TOPICS.items():
        names = [f"{topic}-{place}" for place in range(100)]
        grades = {name: int(mark) for name, mark in zip(names, relevant, strict=True)}
        grades |= {f"{topic}-missed-{number}": 1 for number in range(total - sum(grades.values()))}
        metrics = score_rankings([names], [grades]).metrics
        assert (metrics["ndcg@10"], metrics["mrr@10"], metrics["recall@100"]) == pytest.approx(expected, abs=5e-5)
        found.append(names)
        judged.append(grades)
    score = score_rankings(found, judged)
    assert score.metrics["ndcg@10"] == pytest.approx(0.3016, abs=5e-5)  # over all three
    assert score.metrics["recall@100"] == pytest.approx(0.4980, abs=5e-5)
    assert np.mean(score.examples) == pytest.approx(score.metrics["ndcg@10"])


def test_grades_count_and_a_query_without_an_answer_scores_nothing() -> None:
    metrics = score_rankings([["b", "a"], ["a"]], [{"a": 2, "b": 1, "c": -1}, {"b": 0}]).metrics
    first = (1 + 2 / math.log2(3)) / (2 + 1 / math.log2(3))
    assert metrics == pytest.approx({"ndcg@10": first / 2, "mrr@10": 0.5, "recall@100": 0.5})


def test_of_equal_scores_the_greatest_id_comes_first() -> None:
    """Ranks 67 and 68 of topic 301 above: the same score, in this order."""
    documents = Documents.of({"FBIS3-58025": "x", "FBIS3-58055": "x", "A": "x", "Z": "x"})
    scores = {"FBIS3-58025": 2.3, "FBIS3-58055": 2.3, "A": 2.5, "Z": 2.3}
    scores_D = np.array([scores[name] for name in documents.texts])
    assert [name for name, _ in ranked(documents, scores_D, 10)] == ["A", "Z", "FBIS3-58055", "FBIS3-58025"]
    for depth in (1, 2, 3):
        assert ranked(documents, scores_D, depth) == ranked(documents, scores_D, 10)[:depth]


def test_the_nearest_documents_are_found() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(700, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    documents = Documents.of({f"{number:03}": "x" for number in range(len(vectors))})
    rankings = Index(documents, vectors).search(vectors[:300], depth=5)
    names = list(documents.texts)
    for number, ranking in enumerate(rankings):
        expected = np.argsort(-(vectors @ vectors[number]))[:5]
        assert [name for name, _ in ranking] == [names[place] for place in expected]
        assert ranking[0][0] == names[number] and ranking[0][1] == pytest.approx(1.0, abs=1e-6)


def test_bm25_by_hand() -> None:
    """Lucene's formula on three documents; words are compared without case and endings."""
    documents = Documents.of({"1": "Storms at sea", "2": "The storm, the sea, the storm of storms", "3": "A garden"})
    sizes, mean = {"1": 3, "2": 8, "3": 2}, 13 / 3
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def weight(times: int, name: str) -> float:
        return idf * times / (times + 0.9 * (1 - 0.4 + 0.4 * sizes[name] / mean))

    (ranking,) = BM25(documents).search(["storm"])
    assert dict(ranking) == pytest.approx({"2": weight(3, "2"), "1": weight(1, "1"), "3": 0.0})
    assert [name for name, _ in ranking] == ["2", "1", "3"]
    (twice,) = BM25(documents).search(["storm STORMS unknown"])
    assert dict(twice)["2"] == pytest.approx(2 * weight(3, "2"))
