"""The pin table and a model of parts on disk."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pf_core.errors import PipelineError
from pf_core.model.checkpoint import load_model, load_parts, read_description, save_model
from pf_core.model.parts.inference import embed_records
from pf_core.model.parts.table import ARRAYS, PinTable
from pf_core.pins.lookup import find_pins
from tests.support.parts import NUM_TYPES, known_pins, random_model, random_table, random_timelines

DESCRIPTION = {
    "feature_dim": 6,
    "action_types": [f"type {number}" for number in range(NUM_TYPES)],
    "surfaces": ["homefeed"],
    "time_origin_us": 0,
    "cut_ds": "2026-03-01",
    "training_set": "none",
    "config": {},
    "positive": {},
}


def test_a_table_round_trip(tmp_path: Path) -> None:
    table = random_table(random_model(), tmp_path, num_pins=20)
    table.write(tmp_path / "pin_table")
    again = PinTable.open(tmp_path / "pin_table")
    for name in ARRAYS:
        values = getattr(again, name)
        assert isinstance(values, np.memmap), name
        assert values.dtype == getattr(table, name).dtype
        np.testing.assert_array_equal(values, getattr(table, name))
    assert find_pins(again.ids, pa.array([19, 3, 20])).tolist() == [19, 3, -1]


@pytest.mark.parametrize("config", [{}, {"memory": False}, {"content": False}, {"factor_dim": 0, "heads": 1}])
def test_a_saved_model_computes_the_same(tmp_path: Path, config: dict[str, object]) -> None:
    model = random_model(content_dim=6, **config)
    table = random_table(model, tmp_path, num_pins=40)
    save_model(tmp_path / "model", model, DESCRIPTION, table)
    again, again_table, description = load_parts(tmp_path / "model")
    assert not again.training
    assert description["family"] == "parts"
    assert {name: tuple(place) for name, place in description["slices"].items()} == model.slices
    timelines = random_timelines([5, 1, 30], num_pins=50)
    records = [
        embed_records(known_pins(*each, num_pins=50), timelines, timelines.offsets[:-1], timelines.offsets[1:])
        for each in ((model, table), (again, again_table))
    ]
    for one, other in zip(*records, strict=True):
        np.testing.assert_array_equal(one, other)
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_model_of_parts_is_not_opened_as_towers(tmp_path: Path) -> None:
    model = random_model(content_dim=6)
    save_model(tmp_path / "model", model, DESCRIPTION, random_table(model, tmp_path, num_pins=3))
    assert read_description(tmp_path / "model")["model"]["factor_dim"] == 8
    with pytest.raises(PipelineError, match="family parts"):
        load_model(tmp_path / "model")
