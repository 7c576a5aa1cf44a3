"""The test of a claim: one rule for all claims, on paired users and seeds.

Users are drawn with replacement, the same users for every recipe; a user's value is the mean over the recipe's seeds.
Trainings that differ only in the seed give different metrics, too. Their variance, relative to the metric, is pooled
over all recipes with two seeds or more, and every draw adds to each recipe's metric a normal deviate with that variance
divided by the recipe's number of seeds. A recipe has one such deviate at all frequencies; at frequencies other than
`once` a second one is added, for the variance of the difference from `once`. A baseline is not trained and has none.
The interval contains 95 % of the draws:

- greater: reproduced if the interval is above 0, contradicted if it is below;
- alike: the margin is 5 % of the reference; reproduced inside of it, contradicted outside, on either side;
- no better: the same margin; reproduced below it, contradicted above.

Anything else is not distinguishable. A claim of several parts is reproduced if all are, and contradicted if one is.

P90 coverage counts distinct pins, and users who are drawn twice add no new ones: the bootstrap gives a wrong spread.
Its draws leave out a fifth of the users instead, the same for every recipe. A subsample of m of n users deviates from
the sample as the sample does from the truth, times sqrt((n - m) / m), here 1/2: relative deviations are doubled, around
their mean, because fewer users cover less.

Suffixes: U users, B draws (the first is the sample itself), A days after the cut.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pf_core.config.serving import Frequency
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.experiments.claims import Claim, Kind, Part, Results
from pf_core.experiments.quantities import ALL, Metric, Quantity
from pf_core.experiments.recipe import BASELINES

Verdict = Literal["reproduced", "not distinguishable", "contradicted", "not run"]

NUM_DRAWS = 500

SEED = 20_220_814

MARGIN = 0.05
"""Share of the reference within which two quantities are alike."""

LEVEL = (0.025, 0.975)

LEFT_OUT = 5
"""Each draw of coverage leaves out one in this many users."""

UNTRAINED = frozenset(baseline.name for baseline in BASELINES)


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(self.estimate * factor, low, high)


@dataclass(frozen=True, eq=False)
class PartVerdict:
    part: Part
    verdict: Verdict
    interval: Interval
    """Interval of the statistic, as a share of the reference's estimate if there is a reference."""


@dataclass(frozen=True, eq=False)
class ClaimVerdict:
    claim: Claim
    verdict: Verdict
    parts: tuple[PartVerdict, ...]
    missing: tuple[str, ...]
    """Recipes that have to be run first."""


class Resampled:
    """Metrics of recipes with their bootstrap draws, computed on first use and cached."""

    def __init__(self, results: Results, *, num_draws: int = NUM_DRAWS, seed: int = SEED) -> None:
        self.results, self.num_draws, self.seed = results, num_draws, seed
        num_users = len(results.any_scores.user_ids)
        drawn_BU = np.random.default_rng(seed).multinomial(num_users, [1 / num_users] * num_users, num_draws)
        self.weight_BU = np.concatenate([np.ones((1, num_users)), drawn_BU])
        """Number of times that each user is in a draw."""
        self.is_kept_BU = _subsamples(num_users, num_draws, seed)
        self._draws: dict[Metric, np.ndarray] = {}
        self._variances: dict[tuple[str, str, str, str | None], float] = {}

    def has(self, metric: Metric) -> bool:
        return bool(self._seeds(metric))

    def draws(self, metric: Metric) -> np.ndarray:
        """Return the estimate of a metric, followed by its draws."""
        if metric not in self._draws:
            self._draws[metric] = self._sample(metric) * (1 + self._seed_noise(metric))
        return self._draws[metric]

    def interval(self, quantity: Quantity) -> Interval:
        return _interval(quantity.of({metric: self.draws(metric) for metric in quantity.metrics}))

    def interval_of(self, metric: Metric) -> Interval:
        return _interval(self.draws(metric))

    def ratio(self, metric: Metric, to: Metric) -> Interval:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _interval(self.draws(metric) / self.draws(to))

    def seed_spread(self, metric: Metric) -> float:
        """Return the standard deviation over seeds, relative to the metric, pooled over the recipes.

        NaN if no recipe has two seeds.
        """
        return float(np.sqrt(self._variance(metric, None)))

    def staleness(self, recipe: str) -> list[Interval]:
        """Return recall `once` / recall `realtime` on the positives of each day after the cut, without seed noise."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_BA = self._recall_by_day(recipe, "once") / self._recall_by_day(recipe, "realtime")
        return [_interval(ratio_BA[:, day]) for day in range(ratio_BA.shape[1])]

    def _recall_by_day(self, recipe: str, frequency: Frequency) -> np.ndarray:
        seeds = [scores.frequencies[frequency] for scores in self.results.outcomes[recipe]]
        hits_UA = np.sum([seed.hits_UA for seed in seeds], axis=0)
        positives_UA = np.sum([seed.positives_UA for seed in seeds], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.weight_BU @ hits_UA) / (self.weight_BU @ positives_UA)

    def _seeds(self, metric: Metric) -> list[tuple[Scores, UserScores]]:
        """Return the scores of the recipe's seeds at the metric's frequency; empty unless every seed has the metric."""
        seeds = self.results.outcomes.get(metric.recipe, ())
        found = [
            (scores, scores.frequencies[metric.frequency]) for scores in seeds if metric.frequency in scores.frequencies
        ]
        found = [pair for pair in found if metric.task == ALL or metric.task in pair[1].recall_at_10_by_type]
        return found if len(found) == len(seeds) else []

    def _sample(self, metric: Metric) -> np.ndarray:
        seeds = self._seeds(metric)
        if metric.name == "coverage":
            draws = np.mean(
                [_coverage(users.top_10, scores.index_size, self.is_kept_BU) for scores, users in seeds], axis=0
            )
            deviations = (draws[1:] / draws[1:].mean() - 1) * _scale_of(self.is_kept_BU[1])
            return np.concatenate([draws[:1], draws[0] * (1 + deviations)])
        return _mean(np.mean([_values(users, metric) for _, users in seeds], axis=0), self.weight_BU)

    def _seed_noise(self, metric: Metric) -> np.ndarray:
        """Return the random deviation of each draw for the choice of seeds, relative to the metric; 0 for the
        estimate."""
        noise = np.zeros(self.num_draws + 1)
        if metric.recipe in UNTRAINED:
            return noise
        num_seeds = len(self._seeds(metric))
        at_once = Metric(metric.name, metric.recipe, "once", metric.task)
        noise[1:] = self._normals(at_once) * np.sqrt(np.nan_to_num(self._variance(at_once, None)) / num_seeds)
        if metric.frequency != "once":
            beyond = np.nan_to_num(self._variance(metric, "once"))
            noise[1:] += self._normals(metric) * np.sqrt(beyond / num_seeds)
        return noise

    def _normals(self, metric: Metric) -> np.ndarray:
        """Return standard normal numbers: the same for a metric at every call, independent between metrics."""
        return np.random.default_rng([self.seed, zlib.crc32(repr(metric).encode())]).standard_normal(self.num_draws)

    def _variance(self, metric: Metric, beyond: Frequency | None) -> float:
        """Return the pooled variance of the seeds' relative deviations, or of their difference from `beyond`'s."""
        key = (metric.name, metric.frequency, metric.task, beyond)
        if key not in self._variances:
            squares, freedom = 0.0, 0
            for recipe in self.results.outcomes:
                deviation = self._deviations(Metric(metric.name, recipe, metric.frequency, metric.task))
                if beyond is not None and len(deviation):
                    base = self._deviations(Metric(metric.name, recipe, beyond, metric.task))
                    deviation = deviation - base if len(base) else base
                squares, freedom = squares + float(deviation @ deviation), freedom + max(0, len(deviation) - 1)
            self._variances[key] = squares / freedom if freedom else float("nan")
        return self._variances[key]

    def _deviations(self, metric: Metric) -> np.ndarray:
        """Return each seed's relative deviation from the mean of seeds; empty with one seed or a mean of 0."""
        seeds = self._seeds(metric)
        if len(seeds) < 2:
            return np.zeros(0)
        once = np.ones((1, len(self.results.any_scores.user_ids)))
        values = np.array(
            [
                _coverage(users.top_10, scores.index_size, once)[0]
                if metric.name == "coverage"
                else _mean(_values(users, metric), once)[0]
                for scores, users in seeds
            ]
        )
        return values / values.mean() - 1 if values.mean() > 0 else np.zeros(0)


def assess_claim(claim: Claim, resampled: Resampled) -> ClaimVerdict:
    """Return the verdict on a claim; `not run` if a recipe that it needs has no scores."""
    needed = {metric for part in claim.parts for metric in part.quantity.metrics | _reference_metrics(part)}
    missing = sorted(
        metric.recipe if metric.frequency == "once" else f"{metric.recipe} ({metric.frequency})"
        for metric in needed
        if not resampled.has(metric)
    )
    if missing or not claim.parts:
        return ClaimVerdict(claim, "not run", (), tuple(dict.fromkeys(missing)))
    parts = tuple(assess_part(part, resampled) for part in claim.parts)
    return ClaimVerdict(claim, join_verdicts([part.verdict for part in parts]), parts, ())


def assess_part(part: Part, resampled: Resampled) -> PartVerdict:
    interval = resampled.interval(part.quantity)
    if part.reference is not None and (reference := resampled.interval(part.reference).estimate) > 0:
        interval = interval.scaled(1 / reference)
    return PartVerdict(part, apply_rule(part.kind, interval), interval)


def apply_rule(kind: Kind, interval: Interval) -> Verdict:
    """Apply the rule to an interval that is relative to the reference."""
    low, high = interval.low, interval.high
    if kind == "greater":
        holds, fails = low > 0, high < 0
    elif kind == "alike":
        holds, fails = low > -MARGIN and high < MARGIN, low > MARGIN or high < -MARGIN
    else:
        holds, fails = high < MARGIN, low > MARGIN
    return "reproduced" if holds else "contradicted" if fails else "not distinguishable"


def join_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim of several parts."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "reproduced" if set(verdicts) == {"reproduced"} else "not distinguishable"


def _reference_metrics(part: Part) -> frozenset[Metric]:
    return frozenset() if part.reference is None else part.reference.metrics


def _subsamples(num_users: int, num_draws: int, seed: int) -> np.ndarray:
    rng, num_left_out = np.random.default_rng([seed, LEFT_OUT]), max(1, num_users // LEFT_OUT)
    order_BU = rng.permuted(np.tile(np.arange(num_users), (num_draws, 1)), axis=1)
    return np.concatenate([np.ones((1, num_users)), order_BU >= num_left_out])


def _scale_of(is_kept_U: np.ndarray) -> float:
    return float(np.sqrt(is_kept_U.sum() / (len(is_kept_U) - is_kept_U.sum())))


def _interval(draws: np.ndarray) -> Interval:
    """Return the estimate and its 95 % interval; the ends are NaN if any draw is undefined."""
    low, high = np.quantile(np.where(np.isinf(draws[1:]), np.nan, draws[1:]), LEVEL)
    return Interval(float(draws[0]), float(low), float(high))


def _values(users: UserScores, metric: Metric) -> np.ndarray:
    if metric.name == "entropy":
        entropy_U = users.interest_entropy_at_50
        return np.full(len(users.recall_at_10), np.nan) if entropy_U is None else entropy_U
    return users.recall_at_10 if metric.task == ALL else users.recall_at_10_by_type[metric.task]


def _mean(value_U: np.ndarray, weight_BU: np.ndarray) -> np.ndarray:
    """Return the mean in each draw over the users for whom the value is defined."""
    is_defined_U = ~np.isnan(value_U)
    with np.errstate(invalid="ignore"):
        return (weight_BU @ np.where(is_defined_U, value_U, 0.0)) / (weight_BU @ is_defined_U)


def _coverage(top_UK: np.ndarray, index_size: int, weight_BU: np.ndarray) -> np.ndarray:
    """Return P90 coverage in each draw; `metrics.diversity.p90_coverage` computes it for one.

    Instead of sorting pins by their number of retrievals, this counts the pins with each number of retrievals.
    """
    user, place = np.nonzero(top_UK >= 0)
    if not len(user):
        return np.full(len(weight_BU), np.nan)
    _, pin = np.unique(top_UK[user, place], return_inverse=True)
    result = np.empty(len(weight_BU))
    for draw, weight_U in enumerate(weight_BU):
        times_N = np.bincount(pin, weight_U[user]).astype(np.int64)
        pins_T = np.bincount(times_N)[::-1]  # from the most often retrieved to those never
        times_T = np.arange(len(pins_T))[::-1]
        results_T = np.cumsum(pins_T * times_T)
        wanted = -(-9 * results_T[-1] // 10)
        at = int(np.searchsorted(results_T, wanted))
        before = results_T[at] - pins_T[at] * times_T[at]
        rest = -(-(wanted - before) // times_T[at]) if times_T[at] else 0
        result[draw] = (pins_T[:at].sum() + rest) / index_size
    return result
