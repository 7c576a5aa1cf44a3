"""The recipe of a refit is that of the judged model, with the number of steps that it chose."""

import json
from pathlib import Path
from typing import Any

import pytest

from pf_core.config.training import TrainConfig, auto, tiny
from pf_core.training.refit import JudgedModel, read_judged, refit_config


def read(tmp_path: Path, config: TrainConfig, **result: Any) -> JudgedModel:
    """The judged model of a folder with its description, beside which its result lies."""
    (tmp_path / "model").mkdir()
    described = {"cut_ds": "2026-03-17", "config": config.model_dump(mode="json")}
    (tmp_path / "model" / "model.json").write_text(json.dumps(described))
    (tmp_path / "result.json").write_text(json.dumps({"metrics": {}, **result}))
    return read_judged(tmp_path / "model", served_version="abc-3", version=3)


@pytest.mark.parametrize(
    ("result", "steps"),
    [
        ({"num_steps": 300, "chosen_steps": 125}, 125),
        ({"num_steps": 300, "metrics": {"chosen_steps": 125.0}}, 125),
        ({"num_steps": 300}, 300),
    ],
)
def test_a_refit_trains_as_many_steps_as_the_judged_model_chose(
    tmp_path: Path, result: dict[str, Any], steps: int
) -> None:
    judged = read(tmp_path, auto(), **result)
    assert (judged.num_steps, judged.cut_ds, judged.config) == (steps, "2026-03-17", auto())
    config = refit_config(judged)
    assert (config.optimizer.num_steps, config.optimizer.warmup_steps) == (steps, 20)
    assert config.parts is not None
    assert config.parts.validation_share == 0  # the number of steps is known: nobody is needed to choose it
    assert auto().parts is not None
    assert config.parts.model_copy(update={"validation_share": auto().parts.validation_share}) == auto().parts


def test_a_choice_of_few_steps_shortens_the_warm_up(tmp_path: Path) -> None:
    config = refit_config(read(tmp_path, auto(), num_steps=300, chosen_steps=5))
    assert (config.optimizer.num_steps, config.optimizer.warmup_steps) == (5, 5)


def test_the_towers_are_refitted_with_the_same_configuration(tmp_path: Path) -> None:
    assert refit_config(read(tmp_path, tiny(), num_steps=tiny().optimizer.num_steps)) == tiny()
