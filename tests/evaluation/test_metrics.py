"""Metrics beside the libraries that define them, and numbers published with ROUGE."""

import random

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from sklearn.metrics import accuracy_score, f1_score

from pipeline.evaluation.metrics import (
    calibration_error,
    confusion,
    score_classes,
    score_exact,
    score_summaries,
    score_translations,
    text_habits,
)

WORDS = "the captain looked at a grey sea and said nothing of his letter until morning".split()


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randrange(3, 14))) for _ in range(count)]


def test_classes_as_scikit_learn_counts_them() -> None:
    generator = np.random.default_rng(0)
    chances = generator.dirichlet(np.ones(4), 300)
    labels = generator.integers(0, 3, 300)  # the last class never occurs, but is guessed
    score = score_classes(chances, labels)
    guesses = chances.argmax(1)
    assert score.metrics["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert score.metrics["macro_f1"] == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert np.mean(score.examples) == pytest.approx(score.metrics["accuracy"])
    assert confusion(guesses, labels, 4).sum() == 300


def test_calibration_error_by_hand() -> None:
    """Nine of ten right at confidence 0.9 is perfect; five of ten is 0.4 off."""
    sure = np.full(10, 0.9)
    assert calibration_error(sure, np.array([True] * 9 + [False])) == pytest.approx(0.0)
    assert calibration_error(sure, np.array([True] * 5 + [False] * 5)) == pytest.approx(0.4)


def test_translations_as_sacrebleu_scores_the_whole_corpus() -> None:
    written, first, second = texts(60, 1), texts(60, 2), texts(60, 3)
    for answers in ([(one,) for one in first], list(zip(first, second, strict=True))):
        score = score_translations(written, answers)
        references = [list(column) for column in zip(*answers, strict=True)]
        assert score.metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(written, references).score)
        assert score.metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, references).score)
        assert np.mean(score.examples) == pytest.approx(score.metrics["bleu"])
    assert "tok:13a" in score.signatures["bleu"] and "case:mixed" in score.signatures["bleu"]


def test_an_answer_alone_is_as_good_as_it_is_whatever_the_others_are() -> None:
    """What it adds to the corpus is not: there an equal answer counts more beside worse ones."""
    answers = [(text,) for text in texts(6, 1)]
    one, other = ([text for (text,) in answers] for _ in range(2))
    one[5] = other[5] = other[4] = "nothing of the kind"
    better, worse = score_translations(one, answers), score_translations(other, answers)
    gaps = np.array(better.alone) - np.array(worse.alone)
    assert gaps[4] > 0 and (np.delete(gaps, 4) == 0).all() and better.alone[0] == pytest.approx(100)
    assert (np.array(better.examples) < np.array(worse.examples)).any()


def test_answers_may_differ_in_number() -> None:
    score = score_translations(["the sea", "a letter"], [("the sea",), ("the letter", "a letter")])
    assert score.metrics["chrf"] == pytest.approx(100)


def test_summaries_take_the_best_reference() -> None:
    written, first, second = texts(40, 1), texts(40, 2), texts(40, 3)
    score = score_summaries(written, list(zip(first, second, strict=True)))
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    best = [
        max(scorer.score(one, text)["rougeL"].fmeasure, scorer.score(other, text)["rougeL"].fmeasure)
        for text, one, other in zip(written, first, second, strict=True)
    ]
    assert score.metrics["rougeL"] == pytest.approx(100 * float(np.mean(best)))
    assert np.mean(score.examples) == pytest.approx(score.metrics["rougeL"])


def test_lsum_is_split_at_newlines() -> None:
    one = score_summaries(["a b c\nd e f"], [("d e f\na b c",)]).metrics
    assert one["rougeLsum"] == pytest.approx(100) and one["rougeL"] < 60


def test_exact_match_by_length() -> None:
    score = score_exact(["ba", "x", "cba"], [("ba",), ("a",), ("cba",)], ["ab", "a", "abc"])
    assert score.metrics["exact_match"] == pytest.approx(2 / 3)
    assert (score.metrics["exact_match_length_01"], score.metrics["exact_match_length_03"]) == (0, 1)


def test_habits_of_texts() -> None:
    habits = text_habits(["a b c a b c"], [("x y z",)])
    assert habits == {"length_ratio": 2.0, "repetition": 0.25}
