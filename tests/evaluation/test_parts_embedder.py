"""Evaluation of a model of parts reads what training stored: pins as of the cut, and records from the pin table."""

from pathlib import Path

import numpy as np
import torch

from pf_core.config.training import auto, change_auto
from pf_core.evaluation.parts_embedder import open_parts_embedder
from pf_core.training.trainer import train
from pf_core.training.training_set import open_training_set
from tests.support.parts import complete_parts_set
from tests.support.planted import write_planted_set
from tests.support.questions import planted_question


class Silent:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def test_pins_as_of_the_cut_are_those_of_the_models_table(tmp_path: Path) -> None:
    """The same counts, factors and statistics, computed in two ways; memory's pins are among the user's own."""
    data = open_training_set(complete_parts_set(write_planted_set(tmp_path / "set")))
    parts = {"factor_dim": 8, "trend_dim": 4, "points_in_time": 2}
    config = change_auto(auto(), {"parts": parts, "batch_users": 48, "optimizer": {"num_steps": 4}})
    train(config, training_set=data.path, run_dir=tmp_path / "run", num_workers=0, observer=Silent())
    question = planted_question(data, num_users=10)
    embedder = open_parts_embedder(question, tmp_path / "run" / "model", device=torch.device("cpu"))
    with torch.inference_mode():
        vectors = embedder.pins(np.arange(data.num_pins))
    np.testing.assert_allclose(vectors.numpy(), embedder.known.table.vector.astype(np.float32), atol=2e-3)
    timelines = question.timelines
    is_past = np.concatenate([[0], np.cumsum(timelines.ts < data.cut_us)])
    end_Q = timelines.offsets[:-1] + np.diff(is_past[timelines.offsets])
    queries = embedder.embed(np.arange(10), end_Q)
    np.testing.assert_allclose(queries.vector_VD.norm(dim=1).numpy(), 1, rtol=1e-5)
    assert queries.increments is not None
    for query in range(10):
        own = set(timelines.pin[timelines.offsets[query] : end_Q[query]].tolist())
        remembered = queries.increments.pin_I[queries.increments.query_I == query]
        assert set(remembered.tolist()) == own  # all of them: fewer than memory_size
