"""Recipes change what they claim to change, on any base; and every one of them trains and is judged."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch

from pf_assets.settings import DEMO_SITE
from pf_core.config.serving import Frequency
from pf_core.config.site import Site, load_site
from pf_core.config.training import TrainConfig, demo
from pf_core.config.training_section import TrainingConfig
from pf_core.evaluation.protocol import score_baseline, score_model
from pf_core.evaluation.question import Question, open_question
from pf_core.evaluation.scores import Scores, read_scores
from pf_core.evaluation.summary import summarize
from pf_core.experiments.recipe import BASE, CORE_SETS, Baseline, Experiment, Recipe, Set
from pf_core.experiments.recipes import experiments, recipes
from pf_core.training.trainer import train
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.shared import SharedSites
from tests.support.tiny_world import EXPERIMENTS_SITE, make_tiny_site

EXPECTED: dict[str, dict[str, Any]] = {
    "pinnerformer": {},
    "next_action": {"sampling.objective": "next_action"},
    "sasrec": {"sampling.objective": "sasrec"},
    "all_action": {"sampling.objective": "all_action"},
    "dense_all_action_14d": {"sampling.window_days": 14.0},
    "summed_objectives": {"sampling.objective": "summed"},
    "random_uncorrected": {"loss.negatives": "random", "loss.log_q": "none"},
    "in_batch_uncorrected": {"loss.negatives": "in_batch", "loss.log_q": "none"},
    "mixed_uncorrected": {"loss.log_q": "none"},
    "random_corrected": {"loss.negatives": "random"},
    "in_batch_corrected": {"loss.negatives": "in_batch"},
    "only_repin": {"sampling.positive_types": ("repin",)},
    "only_closeup": {"sampling.positive_types": ("closeup",)},
    "only_click": {"sampling.positive_types": ("click",)},
    "no_pin_feature": {"model.features.pin_feature": False},
    "no_timestamp": {
        "model.features.absolute_time": False,
        "model.features.since_latest": False,
        "model.features.gap": False,
    },
    "no_surface": {"model.features.surface": False},
    "no_action_type": {"model.features.action_type": False},
    "no_duration": {"model.features.duration": False},
    "no_position": {"model.features.position": False},
    "sasrec_unweighted": {"sampling.objective": "sasrec", "sampling.equal_e1_weight": False},
    "sasrec_bce": {
        "sampling.objective": "sasrec",
        "sampling.equal_e1_weight": False,
        "loss.kind": "bce",
        "loss.log_q": "none",
    },
    "no_causal_mask": {"model.is_causal": False},
    "length_4": {"model.sequence_length": 4},
    "length_8": {"model.sequence_length": 8},
    "length_16": {"model.sequence_length": 16},
    "length_32": {"model.sequence_length": 32},
    "length_128": {"model.sequence_length": 128},
    "dim_8": {"model.embedding_dim": 8},
    "dim_16": {"model.embedding_dim": 16},
    "dim_32": {"model.embedding_dim": 32},
    "dim_128": {"model.embedding_dim": 128},
    "layers_1_hidden_32": {"model.num_layers": 1, "model.hidden_dim": 32},
    "layers_1_hidden_64": {"model.num_layers": 1},
    "layers_1_hidden_128": {"model.num_layers": 1, "model.hidden_dim": 128},
    "layers_2_hidden_32": {"model.hidden_dim": 32},
    "layers_2_hidden_128": {"model.hidden_dim": 128},
    "layers_4_hidden_32": {"model.num_layers": 4, "model.hidden_dim": 32},
    "layers_4_hidden_64": {"model.num_layers": 4},
    "layers_4_hidden_128": {"model.num_layers": 4, "model.hidden_dim": 128},
    "strong_actions_only": {"model.sequence_types": ("repin", "closeup", "click")},
    "heads_2": {"model.num_heads": 2},
    "heads_4": {"model.num_heads": 4},
    "noise_0": {},
    "noise_1": {},
    "noise_2": {},
    "noise_4": {},
    "log_q_negatives": {"loss.log_q": "negatives"},
    "default_init": {"model.near_identity_init": False},
    "longer_pinnerformer": {"optimizer.num_steps": 1500},
    "longer_sasrec": {"optimizer.num_steps": 1500, "sampling.objective": "sasrec"},
    "no_relative_time": {"model.features.since_latest": False, "model.features.gap": False},
}

BASELINES = {"popularity_7d", "popularity_ever", "mean_of_20", "mean_of_100", "pinnersage_5", "pinnersage_20"}


@pytest.fixture(scope="module")
def site() -> Site:
    return load_site(EXPERIMENTS_SITE, environment={})


def with_base(site: Site, **training: Any) -> Site:
    return site.model_copy(update={"training": TrainingConfig(**training)})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


def changes(config: TrainConfig, base: TrainConfig) -> dict[str, Any]:
    ours, theirs = flat(config.model_dump()), flat(base.model_dump())
    assert ours.keys() == theirs.keys()
    return {name: value for name, value in ours.items() if value != theirs[name]}


def test_a_recipe_changes_what_it_claims_and_nothing_else(site: Site) -> None:
    base = site.training.towers_config
    found = {name: changes(recipe.change(base), base) for name, recipe in recipes(site).items()}
    assert found == EXPECTED


def test_a_noisy_recipe_changes_the_content_vectors_alone(site: Site) -> None:
    found = {name: recipe.content_noise for name, recipe in recipes(site).items() if recipe.content_noise is not None}
    assert found == {"noise_0": 0, "noise_1": 1, "noise_2": 2, "noise_4": 4}


def test_a_seed_is_the_only_other_change(site: Site) -> None:
    base = demo().model_copy(update={"seed": 5})
    recipe = recipes(site)["no_surface"]
    assert changes(recipe.configure(base, seed=0), base) == EXPECTED["no_surface"]
    assert changes(recipe.configure(base, seed=2), base) == EXPECTED["no_surface"] | {"seed": 5 + 2}


def test_seeds_frequencies_and_order(site: Site) -> None:
    known = experiments(site)
    assert known.keys() - EXPECTED.keys() == BASELINES
    assert all(isinstance(known[name], Baseline) and known[name].num_seeds == 1 for name in BASELINES)
    twice = {name for name, each in known.items() if each.num_seeds == 2}
    others = ("length_", "dim_", "layers_", "heads_", "noise_")
    ours = {"log_q_negatives", "default_init", "no_relative_time", "strong_actions_only"}
    assert twice == {name for name in EXPECTED if not name.startswith(others)} - ours
    everywhere = {name for name, each in known.items() if each.frequencies == get_args(Frequency)}
    objectives = {"next_action", "sasrec", "all_action", "dense_all_action_14d", "summed_objectives"}
    longer = {"longer_pinnerformer", "longer_sasrec"}
    assert everywhere == {"pinnerformer", "sasrec_unweighted", "sasrec_bce"} | objectives | longer
    assert {each.frequencies for name, each in known.items() if name not in everywhere} == {("once",)}
    assert next(iter(known)) == BASE
    is_core = [bool(set(each.sets) & set(CORE_SETS)) for each in known.values()]
    assert is_core == sorted(is_core, reverse=True)
    assert {name for each in known.values() for name in each.sets} == set(get_args(Set))
    assert all(each.why.endswith((".", "?")) for each in known.values())


def test_a_recipe_equal_to_the_base_does_not_exist(site: Site) -> None:
    tiny = recipes(with_base(site, preset="tiny"))
    assert EXPECTED.keys() - tiny.keys() == {"length_8", "dim_8", "heads_2"}
    assert tiny.keys() - EXPECTED.keys() == {"length_64", "dim_64", "heads_8", "layers_2_hidden_64"}  # the demo's own


def test_a_recipe_that_the_base_does_not_admit_does_not_exist(site: Site) -> None:
    odd = with_base(site, preset="demo", changes={"model": {"hidden_dim": 96, "num_heads": 6}})
    gone = EXPECTED.keys() - recipes(odd).keys()
    assert gone == {name for name in EXPECTED if name.startswith("layers_")}  # 6 heads do not divide 32, 64 or 128


def test_positive_types_are_the_sites(site: Site) -> None:
    source = site.source
    positive = source.positive.model_copy(update={"action_types": ("buy", "like")})
    shop = site.model_copy(update={"source": source.model_copy(update={"positive": positive})})
    known, base = recipes(shop), shop.training.towers_config
    assert {name for name in known if name.startswith("only_")} == {"only_buy", "only_like"}
    assert changes(known["strong_actions_only"].change(base), base) == {"model.sequence_types": ("buy", "like")}
    one = positive.model_copy(update={"action_types": ("buy",)})
    shop = site.model_copy(update={"source": source.model_copy(update={"positive": one})})
    assert not [name for name in recipes(shop) if name.startswith("only_")]  # it is what everybody learns from


def test_the_experiments_site_is_the_demo_on_another_world(site: Site) -> None:
    known = load_site(DEMO_SITE, environment={})
    ours, theirs = site.source.model_dump(), known.source.model_dump()
    assert ours["actions"].pop("path") == "actions/{ds}/*.parquet"
    assert theirs["actions"].pop("path") == "actions/{ds}/*.csv.gz"
    assert ours.pop("root") != theirs.pop("root")
    assert ours == theirs
    assert changes(site.training.towers_config, known.training.towers_config) == {"optimizer.num_steps": 600}


# Every recipe, a few steps


class Silence:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


@pytest.fixture(scope="module")
def tiny_site(shared_sites: SharedSites) -> Site:
    torch.set_num_threads(1)
    return shared_sites.get("tiny-world", make_tiny_site)


def run(experiment: Experiment, site: Site, question: Question, run_dir: Path) -> Scores:
    asked: Any = {"frequencies": experiment.frequencies, "progress": lambda message: None}
    if isinstance(experiment, Baseline):
        return score_baseline(question, experiment.name, **asked)
    config = experiment.configure(site.training.towers_config, seed=0)
    data = question.data.path
    train(config, training_set=data, run_dir=run_dir, num_workers=0, observer=Silence())
    return score_model(question, run_dir / "model", **asked)


def test_every_experiment_is_trained_and_judged(tiny_site: Site, tmp_path: Path) -> None:
    question = open_question(tiny_site, open_training_set(latest_training_set(tiny_site)), progress=print)
    known = experiments(tiny_site)
    assert len(known) > 45
    recall = {}
    for name, experiment in known.items():
        scores = run(experiment, tiny_site, question, tmp_path / name)
        scores.write(tmp_path / "scores.parquet", forgotten=pa.array([], pa.int64()))
        scores = read_scores(tmp_path / "scores.parquet")
        assert tuple(scores.frequencies) == experiment.frequencies, name
        assert scores.question == question.fingerprint
        found = summarize(scores)["once"]
        assert found["recall_at_10"] == pytest.approx(np.nanmean(scores.frequencies["once"].recall_at_10)), name
        assert np.isfinite(found["interest_entropy_at_50"]), name
        recall[name] = found["recall_at_10"]
    by_chance = 10 / question.num_pins
    assert recall["pinnersage_20"] >= recall["pinnersage_5"] > by_chance  # the oracle has more to choose from
    assert recall["mean_of_20"] > by_chance
    assert isinstance(known[BASE], Recipe)
    assert len({round(value, 6) for value in recall.values()}) > 10  # they are different models
