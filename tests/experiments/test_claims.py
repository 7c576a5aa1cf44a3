"""The claims are the paper's: its own numbers fulfil them, and they need exactly the recipes that exist."""

from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pf_core.config.site import load_site
from pf_core.config.training import demo
from pf_core.config.training_section import Preset, TrainingConfig
from pf_core.errors import PipelineError
from pf_core.experiments.bootstrap import Interval, apply_rule
from pf_core.experiments.claims import Claim, Results, read_explanations
from pf_core.experiments.paper_claims import all_claims
from pf_core.experiments.paper_tables import paper_sections
from pf_core.experiments.plan import has_content_noise
from pf_core.experiments.quantities import Metric, coverage, drop, gain_per_doubling, mean, recall, slope
from pf_core.experiments.recipe import Set
from pf_core.experiments.recipes import experiments
from tests.support.outcomes import TASKS, once, paper_values, scores, user_scores

DEMO = Path(__file__).parents[2] / "pf_assets" / "demo.yaml"
BASE_MODEL = demo().model
CLAIMS = all_claims(BASE_MODEL, TASKS)


@pytest.fixture(scope="module")
def names() -> set[str]:
    return set(experiments(load_site(DEMO, environment={})))


def test_every_claim_has_its_own_id() -> None:
    assert [name for name, count in Counter(claim.id for claim in CLAIMS).items() if count > 1] == []
    assert len([claim for claim in CLAIMS if not claim.is_ours]) >= 30


def test_claims_need_only_recipes_that_exist(names: set[str]) -> None:
    for claim in CLAIMS:
        assert claim.parts, claim.id
        assert claim.recipes <= names, claim.id


@pytest.mark.parametrize("preset", ["paper", "demo", "tiny"])
def test_on_any_base_exactly_the_reported_recipes_are_trained(preset: Preset) -> None:
    """The demo's own sizes are no exception on another base."""
    site = load_site(DEMO, environment={})
    site = site.model_copy(update={"training": TrainingConfig(preset=preset)})
    base = site.training.towers_config.model
    in_claims = {name for claim in all_claims(base, TASKS) for name in claim.recipes}
    in_tables = {row.recipe for section in paper_sections(base, TASKS) for row in section.rows}
    known = experiments(site)
    noisy = {name for name, experiment in known.items() if has_content_noise(experiment)}  # a figure of their own
    assert in_claims | in_tables == known.keys() - noisy
    assert in_claims <= in_tables


def test_every_set_is_a_section_and_every_recipe_is_in_a_table(names: set[str]) -> None:
    sections = paper_sections(BASE_MODEL, TASKS)
    shown = set(get_args(Set)) - {"content-noise"}  # a figure beside the comparison of models
    assert {section.name for section in sections} == shown
    assert {claim.section for claim in CLAIMS} == shown
    noisy = {name for name in names if name.startswith("noise_")}
    assert {row.recipe for section in sections for row in section.rows} == names - noisy


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_papers_own_numbers_fulfil_the_claim(claim: Claim) -> None:
    values = {metric: np.array([value]) for metric, value in paper_values(BASE_MODEL).items()}
    for part in claim.parts:
        if part.quantity.metrics <= set(values):
            estimate = float(part.quantity.of(values)[0])
            if part.reference is not None:
                estimate /= float(part.reference.of(values)[0])
            assert apply_rule(part.kind, Interval(estimate, estimate, estimate)) == "reproduced", part.quantity.text


def test_most_claims_can_be_checked_against_the_papers_numbers() -> None:
    values = set(paper_values(BASE_MODEL))
    checked = [claim for claim in CLAIMS if all(part.quantity.metrics <= values for part in claim.parts)]
    assert len(checked) >= 30


def test_claims_follow_the_sites_own_model_and_tasks() -> None:
    wide = BASE_MODEL.model_copy(update={"sequence_length": 256, "embedding_dim": 128})
    claims = {claim.id: claim for claim in all_claims(wide, ["watch", "buy"])}
    assert claims["longer-is-better"].recipes == {*(f"length_{n}" for n in (4, 8, 16, 32, 64, 128)), "pinnerformer"}
    assert claims["wider-is-better"].recipes == {*(f"dim_{n}" for n in (8, 16, 32, 64)), "pinnerformer"}
    assert claims["single-task-best"].recipes == {"only_buy", "only_watch", "pinnerformer"}
    assert "multi-task" not in {claim.section for claim in all_claims(BASE_MODEL, ["watch"])}
    assert "multi-task" not in {section.name for section in paper_sections(BASE_MODEL, ["watch"])}


def test_quantities_compute_what_they_say() -> None:
    a, b, c = recall("a"), recall("b", "daily"), recall("c", task="click")
    values = {
        Metric("recall", "a"): np.array([0.4]),
        Metric("recall", "b", "daily"): np.array([0.3]),
        Metric("recall", "c", "once", "click"): np.array([0.5]),
    }
    assert (a - b).of(values) == pytest.approx([0.4 - 0.3])
    assert (a - (b - c)).of(values) == pytest.approx([0.4 - (0.3 - 0.5)])
    assert (a - (b - c)).text == "recall(a) − (recall(b, daily) − recall(c, on click))"
    assert (2.0 * a).of(values) == pytest.approx([2 * 0.4])
    assert drop(a, b).of(values) == pytest.approx([(0.4 - 0.3) / 0.4])
    assert mean([a, b, c]).of(values) == pytest.approx([(0.4 + 0.3 + 0.5) / 3])
    steps = {16: c, 4: a, 8: b}
    # Least squares over x = -1, 0, 1 weighs the ends only.
    assert slope(steps).of(values) == pytest.approx([(0.5 - 0.4) / 2])
    assert gain_per_doubling(steps, 4, 16).of(values) == pytest.approx([(0.5 - 0.4) / 2])
    assert (coverage("x") - a).metrics == {Metric("coverage", "x"), Metric("recall", "a")}


def test_results_of_two_questions_are_refused() -> None:
    other = scores("another", once=user_scores(np.zeros(3)))
    with pytest.raises(PipelineError, match="2 evaluation questions"):
        Results({"a": [once([0, 0, 0])], "b": [other]})
    with pytest.raises(PipelineError, match="no recipe has been run"):
        Results({})


def test_explanations_belong_to_claims(tmp_path: Path) -> None:
    path = tmp_path / "explanations.yaml"
    assert read_explanations(path, CLAIMS) == {}
    path.write_text("random-collapse: >\n  Two\n  lines.\n")
    assert read_explanations(path, CLAIMS) == {"random-collapse": "Two lines."}
    path.write_text("random-colapse: a slip\n")
    with pytest.raises(PipelineError, match="random-colapse"):
        read_explanations(path, CLAIMS)
