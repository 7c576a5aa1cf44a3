"""The rule on constructed samples: it sees what is there, says when it cannot, and knows users from seeds."""

import numpy as np
import pytest
import torch

from pf_core.evaluation.scores import Scores
from pf_core.experiments.bootstrap import Interval, Resampled, Verdict, apply_rule, assess_claim, join_verdicts
from pf_core.experiments.claims import Claim, Part, Results, alike, greater, no_better
from pf_core.experiments.quantities import Metric, coverage, drop, entropy, recall
from pf_core.metrics.diversity import p90_coverage
from tests.support.outcomes import INDEX_SIZE, NUM_DAYS, once, scores, user_scores

NUM_USERS = 400


def claim_of(*parts: Part) -> Claim:
    return Claim(id="it", section="ours", where="here", says="It holds.", parts=parts)


def verdict_of(results: Results, *parts: Part) -> Verdict:
    return assess_claim(claim_of(*parts), Resampled(results)).verdict


def recalls(level: float, *, spread: float = 0.05, seed: int = 0) -> np.ndarray:
    """Users around a level, by exactly that mean."""
    noise = np.random.default_rng(seed).normal(0, spread, NUM_USERS)
    return level + noise - noise.mean()


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [(0.25, 0.20, "reproduced"), (0.20, 0.20, "not distinguishable"), (0.20, 0.25, "contradicted")],
)
def test_greater(ours: float, theirs: float, verdict: Verdict) -> None:
    results = Results({"ours": [once(recalls(ours, seed=1))], "theirs": [once(recalls(theirs, seed=2))]})
    assert verdict_of(results, greater(recall("ours"), recall("theirs"))) == verdict


@pytest.mark.parametrize(
    ("change", "spread", "of_alike", "of_no_better"),
    [
        (0.00, 0.02, "reproduced", "reproduced"),
        (0.03, 0.02, "reproduced", "reproduced"),
        (0.15, 0.02, "contradicted", "contradicted"),
        (-0.15, 0.02, "contradicted", "reproduced"),
        (0.05, 0.02, "not distinguishable", "not distinguishable"),
        (0.00, 0.50, "not distinguishable", "not distinguishable"),
    ],
)
def test_alike_and_no_better(change: float, spread: float, of_alike: Verdict, of_no_better: Verdict) -> None:
    """The standard error of a recall of .2 is spread / 20: .5 % or 12.5 % of it."""
    results = Results(
        {
            "one": [once(recalls(0.2 * (1 + change), spread=spread, seed=1))],
            "other": [once(recalls(0.2, spread=spread, seed=2))],
        }
    )
    assert verdict_of(results, alike(recall("one"), recall("other"))) == of_alike
    assert verdict_of(results, no_better(recall("one"), recall("other"))) == of_no_better


@pytest.mark.parametrize(
    ("kind", "low", "high", "verdict"),
    [
        ("greater", 0.001, 0.2, "reproduced"),
        ("greater", 0.0, 0.2, "not distinguishable"),
        ("greater", -0.2, -0.001, "contradicted"),
        ("alike", -0.049, 0.049, "reproduced"),
        ("alike", -0.051, 0.049, "not distinguishable"),
        ("alike", 0.051, 0.2, "contradicted"),
        ("no_better", -0.9, 0.049, "reproduced"),
        ("no_better", -0.9, 0.051, "not distinguishable"),
        ("no_better", 0.051, 0.9, "contradicted"),
        ("greater", float("nan"), float("nan"), "not distinguishable"),
    ],
)
def test_the_borders_of_the_rule(kind: str, low: float, high: float, verdict: Verdict) -> None:
    assert apply_rule(kind, Interval((low + high) / 2, low, high)) == verdict


@pytest.mark.parametrize(
    ("verdicts", "joined"),
    [
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "not distinguishable"], "not distinguishable"),
        (["reproduced", "not distinguishable", "contradicted"], "contradicted"),
    ],
)
def test_every_part_must_hold(verdicts: list[Verdict], joined: Verdict) -> None:
    assert join_verdicts(verdicts) == joined


def test_users_are_paired() -> None:
    """Each user gains exactly .01: their spread, far larger, does not blur it."""
    theirs = recalls(0.2, spread=0.2)
    resampled = Resampled(Results({"ours": [once(theirs + 0.01)], "theirs": [once(theirs)]}))
    difference = resampled.interval(recall("ours") - recall("theirs"))
    assert [difference.low, difference.estimate, difference.high] == pytest.approx([0.01] * 3, abs=1e-12)
    alone = resampled.interval_of(Metric("recall", "ours"))
    standard_error = theirs.std() / NUM_USERS**0.5
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * standard_error, rel=0.15)


def even(*levels: float) -> list[Scores]:
    """Seeds whose users are all alike: whatever spread there is comes from the seeds."""
    return [once(np.full(NUM_USERS, level)) for level in levels]


def test_seeds_widen_the_interval() -> None:
    """Two seeds 5 % below and above their mean: one degree of freedom, a variance of 2 * .05²."""
    outcomes = {"two": even(0.19, 0.21), "one": even(0.2), "popularity_7d": even(0.2)}
    resampled = Resampled(Results(outcomes))
    spread = (2 * 0.05**2 / 1) ** 0.5
    assert resampled.seed_spread(Metric("recall", "one")) == pytest.approx(spread)
    widths = {name: resampled.interval_of(Metric("recall", name)) for name in outcomes}
    for name, num_seeds in (("two", 2), ("one", 1)):
        expected = 2 * 1.96 * spread / num_seeds**0.5 * 0.2
        assert widths[name].high - widths[name].low == pytest.approx(expected, rel=0.15)
        assert widths[name].estimate == pytest.approx(0.2)
    nothing_trained = widths["popularity_7d"]
    assert [nothing_trained.low, nothing_trained.high] == pytest.approx([0.2, 0.2])


def test_seed_noise_is_pooled_and_needs_two_seeds() -> None:
    pooled = Resampled(Results({"a": even(0.19, 0.21), "b": even(0.3, 0.3, 0.3), "c": even(0.5)}))
    assert pooled.seed_spread(Metric("recall", "c")) == pytest.approx((2 * 0.05**2 / (1 + 2)) ** 0.5)
    alone = Resampled(Results({"c": even(0.5)}))
    assert np.isnan(alone.seed_spread(Metric("recall", "c")))
    of_users = alone.interval_of(Metric("recall", "c"))
    assert [of_users.low, of_users.high] == pytest.approx([0.5, 0.5])


def test_seed_noise_makes_a_small_difference_indistinguishable() -> None:
    part = greater(recall("ours"), recall("theirs"))
    assert verdict_of(Results({"ours": even(0.21), "theirs": even(0.2)}), part) == "reproduced"
    noisy = {"ours": even(0.21), "theirs": even(0.2), "noisy": even(0.18, 0.22)}
    assert verdict_of(Results(noisy), part) == "not distinguishable"


def test_a_recipe_moves_alike_at_all_frequencies() -> None:
    """Seeds that change recall by as much at both frequencies leave the loss between them alone."""

    def at(level: float, loss: float) -> Scores:
        users = {"once": level * (1 - loss), "realtime": level}
        return scores(**{name: user_scores(np.full(NUM_USERS, value)) for name, value in users.items()})

    loss = drop(recall("it", "realtime"), recall("it"))
    together = Resampled(Results({"it": [at(0.19, 0.1), at(0.21, 0.1)]})).interval(loss)
    assert [together.low, together.high] == pytest.approx([0.1, 0.1], abs=1e-9)
    apart = Resampled(Results({"it": [at(0.2, 0.05), at(0.2, 0.15)]})).interval(loss)
    assert apart.high - apart.low > 0.1


def test_per_user_values_are_averaged_over_seeds() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random(NUM_USERS), rng.random(NUM_USERS)
    resampled = Resampled(Results({"it": [once(first), once(second)]}))
    assert resampled.interval_of(Metric("recall", "it")).estimate == pytest.approx((first + second).mean() / 2)


def test_undefined_users_do_not_count() -> None:
    nan = float("nan")
    users = user_scores(
        np.array([0.0, 1.0, 1.0]),
        by_type={"click": np.array([nan, 0.25, 0.75])},
        entropy_U=np.array([1.0, nan, 2.0]),
    )
    resampled = Resampled(Results({"it": [scores(once=users)]}))
    assert resampled.draws(recall_metric := Metric("recall", "it", "once", "click"))[0] == (0.25 + 0.75) / 2
    assert resampled.draws(Metric("entropy", "it"))[0] == (1 + 2) / 2
    assert resampled.has(recall_metric)
    assert not resampled.has(Metric("recall", "it", "once", "repin"))


def lists(num_users: int, seed: int) -> np.ndarray:
    """Some pins far more often than others, and a user without an embedding."""
    top_UK = (INDEX_SIZE * np.random.default_rng(seed).random((num_users, 10)) ** 3).astype(np.int32)
    top_UK[3] = -1
    return top_UK


def draw_lists(top_UK: np.ndarray, times_U: np.ndarray) -> torch.Tensor:
    rows = np.repeat(top_UK, times_U.astype(int), axis=0)
    return torch.from_numpy(rows[rows[:, 0] >= 0].astype(np.int64))


def test_coverage_is_that_of_the_metric() -> None:
    for seed in range(5):
        top_UK = lists(50, seed)
        resampled = Resampled(Results({"it": [scores(once=user_scores(np.zeros(50), top_UK=top_UK))]}), num_draws=40)
        draws = resampled.draws(Metric("coverage", "it"))
        expected = [
            p90_coverage(draw_lists(top_UK, times_U), index_size=INDEX_SIZE) for times_U in resampled.is_kept_BU
        ]
        assert draws[0] == expected[0]
        doubled = 2 * (np.array(expected[1:]) / np.mean(expected[1:]) - 1)  # 40 of 50 kept: sqrt(40 / 10) is 2
        assert draws[1:] == pytest.approx(expected[0] * (1 + doubled))
        assert draws[1:].mean() == pytest.approx(draws[0])


def test_coverage_of_the_same_kind_of_lists_is_seldom_told_apart() -> None:
    """Two embedders that draw from the same popular pins of a user's interest: at 5 % error, about one sample of 20."""
    told_apart = 0
    share = 1 / np.arange(1, 101) / (1 / np.arange(1, 101)).sum()
    for sample in range(20):
        rng = np.random.default_rng(sample)
        interest_U = rng.integers(10, size=200)
        tops = [
            np.stack([100 * interest + rng.choice(100, 10, replace=False, p=share) for interest in interest_U])
            for _ in range(2)
        ]
        one, other = ([scores(once=user_scores(np.zeros(200), top_UK=top.astype(np.int32)))] for top in tops)
        resampled = Resampled(Results({"one": one, "other": other}), num_draws=200)
        difference = resampled.interval(coverage("one") - coverage("other"))
        told_apart += difference.low > 0 or difference.high < 0
    assert told_apart <= 3


def test_coverage_of_everybody_seeing_the_same() -> None:
    resampled = Resampled(Results({"it": [once(np.zeros(20))]}))
    assert resampled.interval_of(Metric("coverage", "it")) == Interval(*[9 / INDEX_SIZE] * 3)
    assert resampled.interval(entropy("it")) == Interval(0, 0, 0)


def test_what_was_not_run_is_named() -> None:
    judged = assess_claim(
        claim_of(greater(recall("it"), recall("absent")), greater(recall("it", "daily"), coverage("it"))),
        Resampled(Results({"it": even(0.2)})),
    )
    assert judged.verdict == "not run"
    assert judged.missing == ("absent", "it (daily)")


def test_the_same_results_give_the_same_verdicts() -> None:
    """Draws do not depend on what was asked before."""
    results = Results({"a": even(0.19, 0.21), "b": even(0.2, 0.22)})
    first, second = Resampled(results), Resampled(results)
    second.draws(Metric("coverage", "b"))
    second.draws(Metric("recall", "b"))
    assert (first.draws(Metric("recall", "a")) == second.draws(Metric("recall", "a"))).all()
    assert first.draws(Metric("recall", "a"))[1] != pytest.approx(first.draws(Metric("recall", "b"))[1] / 0.21 * 0.2)


def test_staleness_compares_the_same_positives() -> None:
    """Day 1: 1 of 4 and 2 of 4; day 2: 1 of 2 and 1 of 2; no positive later."""
    positives_UA, none_UA = np.zeros((2, NUM_DAYS), np.int32), np.zeros((2, NUM_DAYS), np.int32)
    positives_UA[:, 0], positives_UA[:, 1] = 2, 1
    hits = {"once": none_UA.copy(), "realtime": none_UA.copy()}
    hits["once"][0, 0], hits["realtime"][:, 0] = 1, 1
    hits["once"][0, 1], hits["realtime"][0, 1] = 1, 1
    users = {
        name: user_scores(np.zeros(2), hits_UA=hits_UA, positives_UA=positives_UA) for name, hits_UA in hits.items()
    }
    curve = Resampled(Results({"it": [scores(**users)]})).staleness("it")
    assert len(curve) == NUM_DAYS
    assert curve[0].estimate == (1 / 4) / (2 / 4)
    assert curve[1].estimate == (1 / 2) / (1 / 2)
    assert np.isnan(curve[2].estimate)
