"""What a study found: the scores of its models on its tasks, how they differ, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.evaluation import statistics
from pipeline.evaluation.cell import Cell, grouped, metric_of, result_of
from pipeline.evaluation.plan import Candidate, plan_rows
from pipeline.evaluation.study import Study

SHARES = ("accuracy", "macro_f1", "exact_match", "mrr@10", "ndcg@10", "recall@100")  # from 0 to 1; shown as points
SAMPLES = 3  # of every task, side by side
Table = tuple[Sequence[str], list[tuple[object, ...]]]


@dataclass(frozen=True)
class Outcome:
    """What the seeds of one model did on one task."""

    task: str
    candidate: Candidate
    metric: str
    split: str
    cells: list[Cell]
    scores: statistics.Cell
    answers: list[dict[str, Any]]
    """What the first seed answered to every example: source, expected, predicted and score."""
    alone_SN: statistics.Numbers
    """How good the answer of every seed to every example is by itself."""
    baseline: float | None
    """What doing next to nothing scores on the same examples, on the metric's own scale."""

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def scale(self) -> float:
        return 100.0 if self.metric in SHARES else 1.0

    @property
    def unit(self) -> str:
        return "points" if self.scale == 100 else self.metric

    @property
    def measure(self) -> str:
        """The metric with its unit where that is not its own."""
        return f"{self.metric} (points)" if self.scale == 100 else self.metric

    @property
    def values(self) -> list[float]:
        """The score of every seed, as it is shown."""
        return [float(value) for value in self.scale * self.scores.metric_S]

    @property
    def mean(self) -> float:
        return self.scale * self.scores.mean

    @property
    def reach(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds; none for one seed."""
        return None if self.scores.reach is None else self.scale * self.scores.reach


@dataclass(frozen=True)
class Pair:
    """Two models on one task, and how they differ."""

    one: Outcome
    other: Outcome
    difference: statistics.Difference

    @property
    def sentence(self) -> str:
        return statistics.verdict(self.one.name, self.other.name, self.difference, self.one.unit, self.one.scale)


@dataclass(frozen=True)
class Findings:
    """Everything a report says."""

    study: Study
    outcomes: list[Outcome]
    pairs: list[Pair]
    failed: list[str]

    @property
    def tasks(self) -> dict[str, list[Outcome]]:
        """The outcomes of each task."""
        names = dict.fromkeys(outcome.task for outcome in self.outcomes)
        return {name: [outcome for outcome in self.outcomes if outcome.task == name] for name in names}

    @property
    def question(self) -> str:
        config = self.study.config
        default = f"{', '.join(self.study.candidates)}: which is better at what, at equal {config.match}?"
        return config.question or default

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What differs, each with its task, and what failed."""
        return [(pair.one.task, pair.sentence) for pair in self.pairs] + [("failed", line) for line in self.failed]

    @cached_property
    def tables(self) -> dict[str, Table]:
        """All tables by their titles."""
        return {
            "Scores": score_rows(self.outcomes),
            "Differences": difference_rows(self.pairs),
            "What each model got": plan_rows(self.study.candidates, bool(self.study.config.pretrain)),
            "What the jobs took": spent_rows(self),
            "Where they disagree": disagreement_rows(self),
        }

    @cached_property
    def samples(self) -> dict[str, Table]:
        """The same examples of each task as every model answers them, with the score of each answer."""
        return {task: sample_rows(outcomes) for task, outcomes in self.tasks.items()}


def find(study: Study, failed: list[str]) -> Findings:
    """Gather what finished jobs found, and compare on each task those that are to be compared."""
    rates = study.config.learning_rates
    cells = [cell for cell in study.cells() if cell.rate is not None or not rates]  # else not all its rates were tried
    outcomes = [outcome for group in grouped(cells).values() if (outcome := gather(group))]
    pairs = [
        (one, other)
        for one, other in combinations(outcomes, 2)
        if one.task == other.task and (other.name in one.candidate.against or one.name in other.candidate.against)
    ]
    differences = statistics.adjust([statistics.compare(one.scores, other.scores) for one, other in pairs])
    found = [Pair(*pair, difference) for pair, difference in zip(pairs, differences, strict=True)]
    return Findings(study, outcomes, found, failed)


def gather(cells: list[Cell]) -> Outcome | None:
    """The scores of all finished seeds; none if there are none."""
    results = [(cell, result) for cell in cells if (result := result_of(cell))]
    if not results:
        return None
    metric, split = metric_of(results[0][1]), results[0][1]["split"]
    values = [result["metrics"][f"{split}/{metric}"] for _, result in results]
    answers = [result["answers"] for _, result in results]
    compared = answers if len({len(rows) for rows in answers}) == 1 else []
    scores = statistics.Cell(values, [[row.get("adds", row["score"]) for row in rows] for rows in compared])
    alone_SN = np.array([[row["score"] for row in rows] for rows in compared])
    done = [cell for cell, _ in results]
    baseline = results[0][1].get("baselines", {}).get(f"{split}/{metric}")
    return Outcome(cells[0].task, cells[0].candidate, metric, split, done, scores, answers[0], alone_SN, baseline)


# --- Tables ------------------------------------------------------------------------------------------------------


def score_rows(outcomes: list[Outcome]) -> Table:
    """Mean, deviation and interval of every model on every task."""
    rows: list[tuple[object, ...]] = []
    for one in outcomes:
        part = "dev" if one.split == "val" else "test"
        spread, nothing = shown(one.scores.deviation, scale=one.scale), shown(one.baseline, scale=one.scale)
        interval = "-" if one.reach is None else f"{one.mean - one.reach:.2f} to {one.mean + one.reach:.2f}"
        numbers = (len(one.values), shown(one.mean), spread, interval, nothing)
        rows.append((one.task, one.name, one.metric, part, *numbers))
    return ("task", "model", "metric", "part", "seeds", "mean", "deviation", "95 % interval", "baseline"), rows


def difference_rows(pairs: list[Pair]) -> Table:
    """Every comparison with its size beside the noise of seeds, and how sure it is."""
    rows: list[tuple[object, ...]] = []
    for pair in pairs:
        found, scale = pair.difference, pair.one.scale
        interval = "-" if found.interval is None else " to ".join(f"{scale * end:.2f}" for end in found.interval)
        names = f"{pair.one.name} − {pair.other.name}"
        sizes = (shown(found.mean, scale=scale), interval, shown(found.seed_noise, scale=scale), shown(found.effect, 1))
        chances = (shown(found.freedom, 1), shown(found.p_value, 3), shown(found.adjusted, 3))
        verdict = pair.sentence.partition(" (")[0].partition(" by ")[0]
        rows.append((pair.one.task, names, *sizes, *chances, verdict))
    header = ("task", "pair", "difference", "95 % interval", "seed noise", "effect", "freedom", "p", "p of study")
    return (*header, "verdict"), rows


def shown(value: float | None, digits: int = 2, scale: float = 1) -> str:
    """A number of a table, which may not be there."""
    return "-" if value is None else f"{scale * value:.{digits}f}"


def disagreement_rows(findings: Findings) -> Table:
    """How many examples one model gets better than another on average over seeds, and the other way round."""
    rows: list[tuple[object, ...]] = []
    for pair in findings.pairs:
        if len(gap := example_gaps(pair)):
            counts = (int((gap > 0).sum()), pair.other.name, int((gap < 0).sum()), len(gap))
            rows.append((pair.one.task, pair.one.name, *counts))
    return ("task", "model", "better on", "model", "better on", "of examples"), rows


def example_gaps(pair: Pair) -> statistics.Numbers:
    """How much better the first model does each example, on average over seeds."""
    one, other = pair.one.alone_SN, pair.other.alone_SN
    return one.mean(0) - other.mean(0) if one.size and one.shape[1:] == other.shape[1:] else one[:0]


def spent_rows(findings: Findings) -> Table:
    """What every kind of job really took, the mean of its finished seeds."""
    rows: list[tuple[object, ...]] = []
    jobs = (*findings.study.pretraining(), *(cell for one in findings.outcomes for cell in one.cells))
    for (job, name), cells in grouped(cell for cell in jobs if cell.run.finished).items():
        last = [last_row(cell) for cell in cells]
        step, tokens, flops, seconds = (
            sum(row.get(key, 0) for row in last) / len(last) for key in ("step", "tokens", "flops", "seconds")
        )
        rows.append((job, name, len(cells), f"{step:,.0f}", f"{tokens:,.0f}", f"{flops:.3g}", f"{seconds:,.0f}"))
    return ("job", "model", "runs", "steps", "raw tokens", "FLOPs", "seconds"), rows


def sample_rows(outcomes: list[Outcome]) -> Table:
    """A few examples from the first to the last, a row for every model."""
    count = min(len(one.answers) for one in outcomes)
    chosen = np.linspace(0, count - 1, min(SAMPLES, count)).astype(int)
    first = [outcomes[0].answers[number] for number in chosen]
    rows: list[tuple[object, ...]] = [("expected", *(answer["expected"] for answer in first))]
    for one in outcomes:
        told = [one.answers[number] for number in chosen]
        rows.append((one.name, *(f"({one.scale * answer['score']:.0f}) {answer['predicted']}" for answer in told)))
    measure = "chrf" if outcomes[0].metric == "bleu" else outcomes[0].metric  # BLEU is of many answers together
    return (f"seed 1 ({measure})", *(str(answer["source"]) for answer in first)), rows


def last_row(cell: Cell) -> dict[str, Any]:
    """Where a run stood at its end."""
    rows = cell.run.rows()
    return rows[-1] if rows else {}
