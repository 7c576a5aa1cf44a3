"""A small site with a day after the cut, and models for it: near identity they are good, at random they are not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pf_core.config.fields import CategoryField
from pf_core.config.site import Site
from pf_core.config.source import Positive
from pf_core.config.training import ModelConfig
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range, shift_ds
from pf_core.model.checkpoint import save_model
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import build_pin_features
from pf_core.training.build_set import build_training_set
from tests.support.sites import START, SmallSite

NUM_USERS, NUM_PINS = 60, 40
CUT, LAST = shift_ds(START, 1), shift_ds(START, 2)


def make_judged_site(root: Path, *, action_types: Sequence[str] | None = None) -> Site:
    """Three days, of which training sees the first two; users look at pins of one of two interests.

    With `action_types`, actions have these types in turn, as they are in the log, and surfaces of the same names; all
    are positive.
    """
    small = SmallSite(root, {"end_ds": LAST})
    words = ["look"] if action_types is None else list(action_types)
    if action_types is not None:
        small.site = with_types_of_log(small.site, words)
    rng, days = np.random.default_rng(0), ds_range(START, LAST)
    for day, ds in enumerate(days):
        users = np.repeat(np.arange(NUM_USERS), 3)
        pins = 2 * rng.integers(NUM_PINS // 2, size=len(users)) + users % 2
        seconds = day * 86_400 + rng.integers(86_400, size=len(users))
        rows = enumerate(zip(users, pins, seconds, strict=True))
        path = small.write_log(ds, [(int(u), f"p{p}", float(s), words[n % len(words)]) for n, (u, p, s) in rows])
        if action_types is not None:
            logged = pq.read_table(path)
            place = logged.schema.get_field_index("place")
            pq.write_table(logged.set_column(place, "place", logged["event"]), path)
    vectors = np.eye(2)[np.arange(NUM_PINS) % 2] + rng.normal(0, 0.1, (NUM_PINS, 2))
    catalogue = pa.table({"pin": [f"p{pin}" for pin in range(NUM_PINS)], "vector": pa.array(vectors.tolist())})
    (root / "pins").mkdir()
    for ds in days:
        pq.write_table(catalogue, root / "pins" / f"{ds}.parquet")
    training = TrainingConfig(evaluation_days=1, held_out_share=0.5)
    small.site = small.site.model_copy(update={"training": training})
    small.ingest(days)
    small.build(days)
    list(build_pin_features(small.site, days, engine=small.engine, progress=_silent))
    build_training_set(small.site, cut_ds=None, engine=small.engine, progress=_silent)
    small.engine.__exit__(None, None, None)
    return small.site


def with_types_of_log(site: Site, words: Sequence[str]) -> Site:
    """The site with the action types and surfaces that the log has; these are positive."""
    field = CategoryField(column="event")
    actions = site.source.actions.model_copy(
        update={"action_type": field, "surface": field.model_copy(update={"column": "place"})}
    )
    positive = Positive(action_types=tuple(words), surfaces=tuple(words), longer_than_s={})
    return site.model_copy(update={"source": site.source.model_copy(update={"actions": actions, "positive": positive})})


def make_model(*, feature_dim: int, num_types: int = 3, num_surfaces: int = 1, **changes: Any) -> PinnerFormer:
    torch.manual_seed(0)
    config = ModelConfig(
        sequence_length=12, num_layers=1, hidden_dim=16, num_heads=2, embedding_dim=16, category_dim=4, **changes
    )
    return PinnerFormer(config, feature_dim=feature_dim, num_action_types=num_types, num_surfaces=num_surfaces).eval()


def write_model(
    folder: Path,
    *,
    feature_dim: int = 2,
    cut_ds: str = START,
    is_good: bool = True,
    action_types: Sequence[str] = ("closeup",),
    surfaces: Sequence[str] = ("homefeed",),
) -> Path:
    """A model for that site."""
    description = {
        "feature_dim": feature_dim,
        "feature_scale": 1.0,
        "action_types": list(action_types),
        "surfaces": list(surfaces),
        "time_origin_us": 0,
        "cut_ds": cut_ds,
    }
    model = make_model(
        feature_dim=feature_dim,
        num_types=len(action_types),
        num_surfaces=len(surfaces),
        near_identity_init=is_good,
    )
    save_model(folder, model, description)
    return folder


def _silent(message: str) -> None:
    pass
