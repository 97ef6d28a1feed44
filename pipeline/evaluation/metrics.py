"""How good predictions are, over a whole split at once: classes, texts, and how each should be read."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.statistics import Numbers, influences

BY_LENGTH = "exact_match_length_"
Answers = Sequence[Sequence[str]]  # for each prediction all texts that are right


@dataclass(frozen=True)
class Score:
    """Metrics of a split, how they were computed, and what each example adds to the main one."""

    metrics: dict[str, float]
    examples: list[float]
    """What every example adds to the main metric, which is their mean: what a comparison is paired by."""
    signatures: dict[str, str] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)
    """How good every answer is by itself, where what it adds depends on all others."""


# --- Classes -----------------------------------------------------------------------------------------------------


def score_classes(chances_NL: Numbers, labels_N: npt.NDArray[np.int64]) -> Score:
    """Accuracy, macro F1 and calibration error (0–1) of the probabilities of classes."""
    guesses_N = chances_NL.argmax(1)
    right_N = guesses_N == labels_N
    metrics = {
        "accuracy": float(right_N.mean()),
        "macro_f1": macro_f1(confusion(guesses_N, labels_N, chances_NL.shape[1])),
        "calibration_error": calibration_error(chances_NL.max(1), right_N),
    }
    return Score(metrics, right_N.astype(float).tolist())


def confusion(guesses_N: npt.NDArray[np.int64], labels_N: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.int64]:
    """How often each class (rows) was taken for each (columns)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels_N, guesses_N), 1)
    return counts


def macro_f1(counts: npt.NDArray[np.int64]) -> float:
    """The mean over all classes that occur or were guessed; a class that was never right counts 0."""
    right, asked, guessed = counts.diagonal(), counts.sum(1), counts.sum(0)
    there = asked + guessed > 0
    return float((2 * right[there] / (asked + guessed)[there]).mean())


def calibration_error(confidence_N: Numbers, right_N: npt.NDArray[np.bool_], bins: int = 15) -> float:
    """How far confidence is from accuracy, on average over bins of equal width (ECE)."""
    places = np.minimum((confidence_N * bins).astype(int), bins - 1)
    size, sure, right = (np.bincount(places, values, bins) for values in (None, confidence_N, right_N))
    return float(np.abs(sure - right).sum() / max(1, size.sum()))


# --- Rankings ----------------------------------------------------------------------------------------------------


def score_rankings(found: Sequence[Sequence[str]], judged: Sequence[Mapping[str, int]]) -> Score:
    """MRR@10, nDCG@10 and recall@100 (0–1) of the ids found for each query, as trec_eval computes them."""
    rows = []
    for names, grades in zip(found, judged, strict=True):
        gains = [max(0, grades.get(name, 0)) for name in names]
        ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
        ndcg = discounted(gains[:10]) / (discounted(ideal[:10]) or 1)
        reciprocal = next((1 / place for place, gain in enumerate(gains[:10], 1) if gain), 0.0)
        rows.append((ndcg, reciprocal, sum(gain > 0 for gain in gains[:100]) / max(1, len(ideal))))
    metrics = dict(zip(("ndcg@10", "mrr@10", "recall@100"), np.mean(rows, axis=0).tolist(), strict=True))
    return Score(metrics, [row[0] for row in rows], {"ranking": "as trec_eval's ndcg_cut_10, recip_rank, recall_100"})


def discounted(gains: Sequence[int]) -> float:
    """The gains of a ranking, each divided by the logarithm of its place (Järvelin and Kekäläinen, 2002)."""
    return sum(gain / math.log2(place + 1) for place, gain in enumerate(gains, 1))


# --- Texts -------------------------------------------------------------------------------------------------------


def score_translations(written: Sequence[str], answers: Answers) -> Score:
    """sacreBLEU and chrF (0–100) of the whole corpus, with their signatures."""
    import sacrebleu

    references: Any = list(zip_longest(*answers))  # the first of all, the second of all, …, None where there is none
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    metrics = {
        "bleu": bleu.corpus_score(written, references).score,
        "chrf": chrf.corpus_score(written, references).score,
    }
    signatures = {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}
    parts = [bleu.corpus_score([text], [[one] for one in good]) for text, good in zip(written, answers, strict=True)]
    sums_NK = np.array([[*part.counts, *part.totals, part.sys_len, part.ref_len] for part in parts], np.float64)
    examples = influences(sums_NK, bleu_of).tolist()
    alone = [chrf.sentence_score(text, list(good)).score for text, good in zip(written, answers, strict=True)]
    return Score(metrics | text_habits(written, answers), examples, signatures, alone)


def bleu_of(sums_K: Numbers) -> float:
    """BLEU from matches and n-grams of the four orders and the two lengths, summed over a corpus."""
    import sacrebleu

    counts = [int(number) for number in sums_K]
    return float(sacrebleu.BLEU.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)


def score_summaries(written: Sequence[str], answers: Answers) -> Score:
    """ROUGE-1, -2, -L and -Lsum (0–100, with stemming), each summary against its best reference."""
    from rouge_score import rouge_scorer

    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = rouge_scorer.RougeScorer(kinds, use_stemmer=True)
    best = [scorer.score_multi(list(good), text) for text, good in zip(written, answers, strict=True)]
    rows = [[100 * one[kind].fmeasure for kind in kinds] for one in best]
    metrics = dict(zip(kinds, np.mean(rows, axis=0).tolist(), strict=True))
    examples = [row[kinds.index("rougeL")] for row in rows]
    return Score(metrics | text_habits(written, answers), examples, {"rouge": "rouge-score, stemmer, best by F"})


def score_exact(written: Sequence[str], answers: Answers, sources: Sequence[str] = ()) -> Score:
    """The share of texts that are right to the letter (0–1), in all and by length of the source where there is one."""
    right = [float(text in good) for text, good in zip(written, answers, strict=True)]
    metrics = {"exact_match": float(np.mean(right))}
    for length in sorted(set(map(len, sources))):
        own = [score for score, source in zip(right, sources, strict=True) if len(source) == length]
        metrics[f"{BY_LENGTH}{length:02}"] = float(np.mean(own))
    return Score(metrics, right)


def text_habits(written: Sequence[str], answers: Answers) -> dict[str, float]:
    """How long texts are beside their first answers (1 is as long), and how often words repeat in threes (0–1)."""
    words, expected = (sum(len(text.split()) for text in texts) for texts in (written, (good[0] for good in answers)))
    repeated = total = 0
    for text in written:
        parts = text.split()
        grams = Counter(zip(parts, parts[1:], parts[2:], strict=False))
        total += grams.total()
        repeated += grams.total() - len(grams)
    return {"length_ratio": words / max(1, expected), "repetition": repeated / max(1, total)}
