"""Whether one model is better than another, or seeds and examples only fell that way: intervals, tests and words.

Shapes: S seeds, N examples, K numbers that a corpus metric is computed from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit  # Student's t: the chance below a value, and the value

from pipeline.errors import UserError

Numbers = npt.NDArray[np.float64]
LEVEL = 0.95
ROUNDING = 1e-12  # relative to the metric: what is smaller differs only in the last bits


class Cell:
    """The scores of one model on one task: the metric of every seed, and what every example scored under it.

    Examples count in the interval where the metric is their mean (accuracy, ROUGE, reciprocal rank). A stand-in in
    other units (chrF of a sentence beside BLEU of a corpus) has no exchange rate that a few seeds could tell: it is
    left out and the verdict says so. `influences` gives examples in the units of such a metric.
    """

    def __init__(self, metric: npt.ArrayLike, examples: npt.ArrayLike = ()) -> None:
        try:
            self.metric_S: Numbers = np.asarray(metric, np.float64)
            self.examples_SN: Numbers = np.asarray(examples, np.float64)
        except ValueError as error:
            raise UserError(f"scores cannot be compared: every seed must score the same examples ({error})") from error
        if self.metric_S.ndim != 1 or not self.metric_S.size:
            raise UserError("scores cannot be compared: give one metric for each seed, and at least one seed")
        seeds = len(self.metric_S)
        if self.examples_SN.size and (self.examples_SN.ndim != 2 or len(self.examples_SN) != seeds):
            raise UserError(f"scores cannot be compared: {seeds} seeds, but examples of shape {self.examples_SN.shape}")
        rows = np.column_stack([self.metric_S, self.examples_SN.reshape(seeds, -1)])
        if not (finite := np.isfinite(rows).all(1)).all():
            number = int(finite.argmin()) + 1
            raise UserError(f"scores cannot be compared: those of seed number {number} hold NaN or infinity")
        self.examples = 0
        """How many examples count: 0 where the metric is not their mean, or a single one has no variance."""
        if self.examples_SN.size > seeds and np.allclose(rows[:, 1:].mean(1), self.metric_S, rtol=1e-6, atol=1e-9):
            self.examples = rows.shape[1] - 1

    @property
    def mean(self) -> float:
        """The metric, averaged over seeds."""
        return float(self.metric_S.mean())

    @property
    def deviation(self) -> float | None:
        """How much the metric differs from seed to seed (standard deviation; none for one seed)."""
        return float(self.metric_S.std(ddof=1)) if len(self.metric_S) > 1 else None

    @property
    def reach(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds (none for one seed)."""
        if self.deviation is None:
            return None
        seeds = len(self.metric_S)
        return float(stdtrit(seeds - 1, (1 + LEVEL) / 2)) * self.deviation / math.sqrt(seeds)


@dataclass(frozen=True)
class Difference:
    """How far one model is from another in the units of the metric, and how sure that is."""

    mean: float
    """First minus second, each averaged over its seeds."""
    seeds: tuple[int, int]
    examples: int
    """Examples whose chance is in the interval; 0: only seeds are, and it holds for these examples alone."""
    interval: tuple[float, float] | None
    """The 95 % interval for this pair alone; with one seed it covers the choice of examples only."""
    freedom: float | None = None
    """Welch's degrees of freedom; like all that follows, none where a model has one seed."""
    p_value: float | None = None
    seed_noise: float | None = None
    """The standard deviation from seed to seed, pooled over both models."""
    effect: float | None = None
    """The mean in units of the seed noise; none where there is no noise."""
    adjusted: float | None = None
    """The p-value after Holm's correction over all comparisons of the study: what the verdict goes by."""
    comparisons: int = 1


def compare(one: Cell, other: Cell, *, draws: int = 2000, seed: int = 0) -> Difference:
    """The difference of two models with its interval: seeds by Welch, examples by a paired bootstrap.

    It errs on the side of caution. What chance does where one seed meets one example is counted in both parts, and the
    degrees of freedom are those of the seeds: Welch's formula over all three variances would find more, but calls up
    to 8 % of true nulls different when three seeds of one model vary far more than those of the other.
    """
    rounding = ROUNDING * max(np.abs(one.metric_S).max(), np.abs(other.metric_S).max())
    mean = one.mean - other.mean
    mean = mean if abs(mean) > rounding else 0.0
    seeds = len(one.metric_S), len(other.metric_S)
    examples = one.examples if other.examples else 0
    example_variance = 0.0
    if examples:
        if examples != other.examples:
            raise UserError(f"models cannot be paired: one has scores of {examples} examples, one of {other.examples}")
        difference_N = one.examples_SN.mean(0) - other.examples_SN.mean(0)
        example_variance = bootstrap_variance(difference_N, draws, seed)
    first, second = one.deviation, other.deviation
    if first is None or second is None:
        reach = float(stdtrit(examples - 1, (1 + LEVEL) / 2)) * math.sqrt(example_variance) if examples else 0
        return Difference(mean, seeds, examples, (mean - reach, mean + reach) if examples else None)

    variances = first**2 / seeds[0], second**2 / seeds[1]
    freedom = welch_freedom(variances, seeds)
    error = math.sqrt(sum(variances) + example_variance)
    error = error if error > rounding else 0.0
    p_value = float(2 * stdtr(freedom, -abs(mean) / error)) if error else float(mean == 0)
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    noise = math.sqrt((first**2 + second**2) / 2)
    effect = mean / noise if noise > rounding else None
    interval = mean - reach, mean + reach
    return Difference(mean, seeds, examples, interval, freedom, p_value, noise, effect, adjusted=p_value)


def adjust(differences: Sequence[Difference]) -> list[Difference]:
    """The differences of a whole study, corrected for how many were looked at."""
    adjusted = holm([difference.p_value for difference in differences])
    tests = sum(value is not None for value in adjusted)
    return [replace(old, adjusted=new, comparisons=tests) for old, new in zip(differences, adjusted, strict=True)]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values that stay honest together (Holm, 1979); None is no test, stays None and is not counted."""
    if any(value is not None and not 0 <= value <= 1 for value in p_values):  # NaN, too, is not within
        raise ValueError(f"p-values lie between 0 and 1: {p_values}")
    adjusted: list[float | None] = [None] * len(p_values)
    ranked = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    highest = 0.0
    for rank, (value, place) in enumerate(ranked):
        highest = max(highest, min(1.0, value * (len(ranked) - rank)))
        adjusted[place] = highest
    return adjusted


def verdict(name_one: str, name_other: str, difference: Difference, unit: str, scale: float = 1) -> str:
    """What the difference shows, in words; `scale` 100 turns shares (0–1) into points."""
    mean, interval = difference.mean * scale, tuple(scale * end for end in difference.interval or ())
    decimals = count_decimals(interval[1] - mean if interval else abs(mean))
    signed = f"{name_one} − {name_other} {written(mean, decimals)} {unit}"
    bounds = " to ".join(written(end, decimals) for end in interval)
    if difference.adjusted is None or difference.p_value is None:
        known = f"95 % interval over the choice of examples alone {bounds}" if bounds else "no interval"
        return f"one seed shows nothing about seeds ({signed}, {known})"

    fewest, most = sorted(difference.seeds)
    seeds = f"{most} seeds" if fewest == most else f"{fewest} and {most} seeds"
    note = "" if difference.examples else "; the choice of examples is not counted"
    if difference.p_value >= 1 - LEVEL:
        return f"no difference that {seeds} can show ({signed}, 95 % interval {bounds}{note})"
    if difference.adjusted >= 1 - LEVEL:
        alone = f"{signed}, 95 % interval for this pair alone {bounds}, {seeds}{note}"
        return f"no difference that stands among {difference.comparisons} comparisons ({alone})"
    ahead, behind = (name_one, name_other) if mean > 0 else (name_other, name_one)
    bounds = " to ".join(written(end, decimals) for end in sorted(abs(end) for end in interval))
    by = f"{written(abs(mean), decimals)} {unit}"
    return f"{ahead} ahead of {behind} by {by} (95 % interval {bounds}, {seeds}{note})"


def influences(sums_NK: Numbers, metric: Callable[[Numbers], float]) -> Numbers:
    """What each example adds to a metric of the whole corpus, such as BLEU, in its units; their mean is the metric.

    `metric` takes the sum over examples of `sums_NK` (for BLEU: matches, n-grams and lengths). These are the
    jackknife's pseudo-values (Tukey, 1958) without its correction of bias: the variance of their mean is that of the
    metric, to first order.
    """
    total_K = sums_NK.sum(0)
    without_N = np.array([metric(total_K - sums_K) for sums_K in sums_NK], np.float64)
    return np.asarray(metric(total_K) + (len(sums_NK) - 1) * (without_N.mean() - without_N))


# --- Variances ---------------------------------------------------------------------------------------------------


def bootstrap_variance(difference_N: Numbers, draws: int, seed: int) -> float:
    """The variance of a mean over examples, from means of examples drawn again with replacement (Efron, 1979)."""
    count = len(difference_N)
    generator = np.random.default_rng(seed)
    means: list[Numbers] = []
    block = max(1, 2**20 // count)  # draws at once: bounds memory whatever the number of examples
    for start in range(0, draws, block):
        places = generator.integers(0, count, (min(block, draws - start), count), dtype=np.int32)
        means.append(difference_N[places].mean(1))
    # A sample varies less around its own mean than around the truth: the factor of Bessel.
    return float(np.concatenate(means).var(ddof=1)) * count / (count - 1)


def welch_freedom(variances: tuple[float, float], seeds: tuple[int, int]) -> float:
    """Welch's (1947) degrees of freedom of a difference of means; the fewest possible where no seed differs."""
    parts = [variance / max(sum(variances), 1e-300) for variance in variances]
    spread = sum(part**2 / (count - 1) for part, count in zip(parts, seeds, strict=True))
    return 1 / spread if spread else min(seeds) - 1


# --- Words -------------------------------------------------------------------------------------------------------


def count_decimals(reach: float) -> int:
    """As many decimals as show two digits of an interval's reach, and at least one."""
    return min(6, max(1, 1 - math.floor(math.log10(reach)))) if reach > 0 else 1


def written(number: float, decimals: int) -> str:
    """A number with a true minus, and without the minus of −0."""
    return f"{round(number, decimals) + 0.0:.{decimals}f}".replace("-", "−")
