import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from pf_core.config.parts import PartsConfig
from pf_core.config.serving import PromotionConfig
from pf_core.config.training import (
    LossConfig,
    ModelConfig,
    TowersPreset,
    TrainConfig,
    auto,
    change_auto,
    choose,
    demo,
    paper,
    tiny,
)
from pf_core.config.training_section import LaunchConfig, TrainingConfig
from pf_core.errors import PipelineError

PRESETS: dict[TowersPreset, Callable[[], TrainConfig]] = {"paper": paper, "demo": demo, "tiny": tiny}


def leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, inner in value.items():
        found += leaves(inner, (*path, key)) if isinstance(inner, dict) else [((*path, key), inner)]
    return found


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


OTHER: dict[tuple[str, ...], Any] = {
    ("model", "hidden_dim"): 32,
    ("model", "num_heads"): 4,
    ("model", "dropout"): 0.5,
    ("model", "sequence_types"): ["repin"],
    ("sampling", "objective"): "sasrec",
    ("sampling", "positive_types"): ["repin"],
    ("sampling", "sequence_fraction"): 0.5,
    ("loss", "negatives"): "random",
    ("loss", "log_q"): "negatives",
    ("loss", "sketch_width"): 1 << 11,
    ("optimizer", "decay"): "linear",
    ("optimizer", "beta1"): 0.5,
    ("optimizer", "beta2"): 0.5,
    ("precision",): "bfloat16",
    ("parts",): {},
}


def different(path: tuple[str, ...], value: Any) -> Any:
    if path in OTHER:
        return OTHER[path]
    return not value if isinstance(value, bool) else value + 1


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_survive_json(preset: TowersPreset) -> None:
    config = PRESETS[preset]()
    again = TrainConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert TrainConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert again.fingerprint() == config.fingerprint()
    assert choose(preset, {}) == config


def test_the_paper_preset_is_the_papers() -> None:
    config = paper()
    assert (config.model.sequence_length, config.model.embedding_dim) == (256, 256)
    assert (config.model.num_layers, config.model.hidden_dim, config.model.num_heads) == (6, 768, 8)
    assert config.model.is_causal
    assert all(config.model.features.model_dump().values())
    assert (config.loss.max_in_batch, config.loss.num_random) == (5000, 8192)
    assert (config.loss.kind, config.loss.negatives, config.loss.log_q) == ("softmax", "mixed", "all")
    assert (config.sampling.objective, config.sampling.window_days) == ("dense_all_action", 28)
    assert config.sampling.max_positives_per_sequence == 32
    assert config.sampling.positive_types is None
    assert config.batch_users == 128 * 8


def test_any_field_changes_the_fingerprint() -> None:
    base = tiny()
    fingerprints = {base.fingerprint()}
    fields = leaves(base.model_dump(mode="json"))
    for path, value in fields:
        if path == ("loss", "kind"):
            changes: dict[str, Any] = {"loss": {"kind": "bce", "log_q": "none"}}
        else:
            changes = nested(path, different(path, value))
        fingerprints.add(choose("tiny", changes).fingerprint())
    fingerprints.add(choose("tiny", {"loss": {"log_q": "none"}}).fingerprint())
    assert len(fingerprints) == 1 + len(fields) + 1


def test_changes_touch_nothing_else() -> None:
    changed = choose("demo", {"model": {"num_layers": 4, "features": {"gap": False}}, "seed": 3}).model_dump()
    expected = demo().model_dump()
    expected["model"]["num_layers"], expected["model"]["features"]["gap"], expected["seed"] = 4, False, 3
    assert changed == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"num_layer": 4}}, ["model.num_layer"]),
        ({"sead": 4}, ["sead"]),
        ({"model": {"features": {"gaps": False}}}, ["model.features.gaps"]),
        ({"model": {"hidden_dim": 18, "num_heads": 4}}, ["hidden_dim 18", "num_heads 4"]),
        ({"loss": {"kind": "bce"}}, ["log_q"]),
        ({"loss": {"sketch_width": 1000}}, ["sketch_width 1000", "power of two"]),
        ({"loss": {"temperature": 0.001}}, ["loss.temperature"]),
        ({"loss": {"negatives": "hard"}}, ["loss.negatives", "in_batch"]),
        ({"sampling": {"window_days": 0}}, ["sampling.window_days"]),
        ({"optimizer": 3}, ["optimizer"]),
        ({"loss": {"num_random": 0}, "seed": -1}, ["loss.num_random", "seed"]),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PipelineError) as caught:
        choose("tiny", changes)
    for word in words:
        assert word in str(caught.value)


def test_binary_cross_entropy_goes_without_correction() -> None:
    assert choose("tiny", {"loss": {"kind": "bce", "log_q": "none"}}).loss.kind == "bce"
    with pytest.raises(ValidationError, match="log_q"):
        LossConfig(kind="bce", log_q="negatives")


def test_a_model_must_see_something() -> None:
    names = ["pin_feature", "action_type", "surface", "duration", "absolute_time", "since_latest", "gap"]
    off = dict.fromkeys(names, False)
    with pytest.raises(ValidationError, match="every feature is switched off"):
        ModelConfig.model_validate({"features": off})
    for name in names:
        ModelConfig.model_validate({"features": {**off, name: True}})


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        tiny().model.num_layers = 3


def test_many_nodes_need_a_meeting_place() -> None:
    with pytest.raises(ValidationError, match="rendezvous_endpoint"):
        LaunchConfig(num_nodes=2)
    assert LaunchConfig(num_nodes=2, rendezvous_endpoint="host:29500").num_nodes == 2
    assert (LaunchConfig().num_nodes, LaunchConfig().rendezvous_endpoint) == (1, None)
    with pytest.raises(ValidationError, match="processes_per_node"):
        LaunchConfig(processes_per_node=0)


def test_the_site_files_section() -> None:
    section = TrainingConfig(preset="tiny", changes={"model": {"num_layers": 3}})
    assert section.towers_config.model.num_layers == 3
    assert TrainingConfig(preset="demo").towers_config == demo()
    with pytest.raises(ValidationError, match=r"model\.num_layer:"):
        TrainingConfig(preset="tiny", changes={"model": {"num_layer": 3}})
    with pytest.raises(ValidationError, match="held_out_share"):
        TrainingConfig(held_out_share=1.0)


def test_recipes_start_from_demo_where_the_site_says_auto() -> None:
    section = TrainingConfig(changes={"parts": {"memory": False}, "optimizer": {"num_steps": 50}})
    assert section.preset == "auto"
    assert section.towers_config == demo()


def test_changes_of_auto_are_those_of_a_model_of_parts() -> None:
    assert auto().parts == PartsConfig()
    assert change_auto(auto(), {"parts": {"memory": False}}).parts == PartsConfig(memory=False)
    with pytest.raises(ValidationError, match=r"parts\.memry:"):
        TrainingConfig(changes={"parts": {"memry": False}})
    for change in ({"model": {"num_layers": 4}}, {"sampling": {"objective": "sasrec"}}, {"loss": {}}, {"parts": None}):
        with pytest.raises(ValidationError, match=r"set training\.preset to demo or paper"):
            TrainingConfig(changes=change)


def test_one_part_of_the_vector_stays_on() -> None:
    off = {"factor_dim": 0, "trend_dim": 0, "content": False}
    for left in off:
        PartsConfig(**{name: value for name, value in off.items() if name != left})
    with pytest.raises(ValidationError, match=r"are all switched off: a vector would have no part; leave one of them"):
        TrainingConfig(changes={"parts": {**off, "memory": True, "transformer_layers": 2}})


def test_the_number_of_evaluation_days_is_chosen_later_unless_it_is_given() -> None:
    assert TrainingConfig().evaluation_days is None
    assert TrainingConfig(evaluation_days=0).evaluation_days == 0
    with pytest.raises(ValidationError, match="evaluation_days"):
        TrainingConfig(evaluation_days=-1)


def test_the_first_model_is_promoted_by_default() -> None:
    assert PromotionConfig().first == "always"
    assert PromotionConfig.model_validate({"first": "only_if_better"}).first == "only_if_better"
    with pytest.raises(ValidationError, match="first"):
        PromotionConfig.model_validate({"first": "never"})
