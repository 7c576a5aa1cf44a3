"""Our own rows of the benchmark: the product's model, trained on the log as the product trains it.

The model sees the training set that ends with the cut, and nothing else. The test users are embedded from their actions
before the cut, with the records that serving would store (before the rounding of vectors to float16), and their lists
are made twice: as served, and by the vector alone (`ranking.py`). A model of parts ranks every pin of the index; the
towers rank the pins with a content vector, and the shares of other positives and actions are part of the result.

A number of steps (`max_steps`) below the towers' own gives the same model at every run with the same seed; a model of
parts chooses its number of steps itself. Time is a second limit, for slow machines (`budget.py`). The note reports each
such change.

Suffixes: U test users, N pins of the index, F content.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from pf_core.benchmark.budget import changed, fit_to_budget, seconds_per_step, with_steps
from pf_core.benchmark.log import BenchmarkLog, RankedLists
from pf_core.benchmark.ranking import rank_pins
from pf_core.benchmark.stages import prepare_training_set
from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.config.training_section import Preset
from pf_core.engine.base import Engine
from pf_core.model.device import choose_device
from pf_core.pins.features import read_pin_features
from pf_core.pins.packed import finite_features
from pf_core.progress import Progress, Throttle
from pf_core.training.auto import Choice, describe_choice
from pf_core.training.parts.prepared import remove_prepared
from pf_core.training.plan import code_fingerprint, plan_config, resolve_config
from pf_core.training.trainer import train
from pf_core.training.training_set import open_training_set, read_training_set_manifest, refuse_without_content

TOWERS_SHOWN = ("num_layers", "hidden_dim", "embedding_dim", "sequence_length")
"""Settings that describe the towers in a line."""

PARTS_SHOWN = ("factor_dim", "content", "trend_dim", "memory", "transformer_layers", "window_days")
"""Settings that describe a model of parts in a line."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OurResult:
    """The lists of our model, and how they were made."""

    lists: RankedLists
    """As served: by cosine and memory."""
    vector_lists: RankedLists
    """By the cosine alone."""
    has_memory: bool
    """Whether users have increments at all; without them the two sets of lists are the same."""
    note: str
    seconds: float
    """Duration of training and embedding, without the stages that build the training set."""
    settings: dict[str, Any]
    """What describes the model and its training in a line."""
    num_unranked_pins: int
    """Number of the index's pins that the model has no vector for."""
    share_of_positives_without_vector: float
    """Share of all positives, askable or not, whose pin is not ranked."""
    share_of_actions_without_vector: float
    """Share of the test users' actions before the cut whose pin is not ranked."""


def our_lists(
    site: Site,
    log: BenchmarkLog,
    *,
    preset: Preset | None,
    seed: int,
    max_steps: int | None,
    budget_s: float,
    engine: Engine,
    folder: Path,
    progress: Progress,
) -> OurResult:
    """Train the site's own configuration, or that of `preset`, and return the lists of the test users.

    pin_features must exist for the day of the cut. `max_steps` limits the steps of the towers, and `budget_s` the time
    of training and embedding. `folder` gets the model.
    """
    data = open_training_set(prepare_training_set(site, log.cut_ds, engine=engine, progress=progress))
    started = time.monotonic()
    wanted, chosen = _configuration(site, data.path, preset, seed)
    for choice in chosen:
        progress(describe_choice(choice))
    manifest = read_training_set_manifest(data.path)
    refuse_without_content(manifest, wanted, preset or site.training.preset)
    num_workers, prepared = site.training.launch.num_workers, folder / "prepared"
    remove_prepared(prepared)  # an interrupted benchmark may have left it

    def measure(config: TrainConfig) -> float:
        return seconds_per_step(config, data, folder / "measured", num_workers, prepared=prepared)

    num_steps = wanted.optimizer.num_steps
    planned = with_steps(wanted, num_steps if wanted.parts is not None else min(max_steps or num_steps, num_steps))
    config = fit_to_budget(planned, measure, budget_s=budget_s, num_test_users=len(log.test_user_ids))
    plan = plan_config(config, data.path, manifest, folder, code=code_fingerprint())
    planned_s = time.monotonic() - started
    trained = train(
        config,
        training_set=data.path,
        run_dir=plan.run_dir,
        num_workers=num_workers,
        observer=_Lines(progress, what="our model" if preset is None else f"preset {preset}"),
        prepared=prepared,
    )
    remove_prepared(prepared)
    started = time.monotonic()
    ranking = rank_pins(log, data, plan.run_dir / "model")
    has_vector_N = ranking.is_ranked_N
    chosen_steps = trained["metrics"].get("chosen_steps")
    return OurResult(
        lists=ranking.served,
        vector_lists=ranking.vector_alone,
        has_memory=ranking.has_memory,
        note=_describe(
            wanted,
            planned,
            config,
            chosen_steps=None if chosen_steps is None else int(chosen_steps),
            num_popular=ranking.num_popular,
            budget_s=budget_s,
        ),
        seconds=planned_s + trained["seconds"] + time.monotonic() - started,  # the model may have been trained before
        settings={"preset": preset or site.training.preset} | _settings(config),
        num_unranked_pins=int((~has_vector_N).sum()),
        share_of_positives_without_vector=positives_without_vector(log, has_vector_N),
        share_of_actions_without_vector=actions_without_vector(log, has_vector_N),
    )


# Training


def _configuration(
    site: Site, training_set: Path, preset: Preset | None, seed: int
) -> tuple[TrainConfig, list[Choice]]:
    """Return the site's configuration, or a preset, without what only costs time here and changes no weight.

    The settings that preset auto chose are returned, too. The evaluations of towers change no weight; those of a model
    of parts choose its number of steps. Presets are made for GPUs: on a CPU, bfloat16 is slower than float32, and
    compiling takes longer than the budget.
    """
    if preset is None:
        config, chosen = resolve_config(training_set, site.training.preset, site.training.changes)
    else:
        config, chosen = resolve_config(training_set, preset, {})
    changes: dict[str, Any] = {"seed": seed}
    if config.parts is None:
        changes |= {"evaluate_users": 1, "evaluate_pins": 1}
    if preset is not None and choose_device("auto").type == "cpu":
        changes |= {"precision": "float32", "compile": False}
    return changed(config, changes), chosen


class _Lines:
    """Observer that shows a line of the training every few seconds."""

    def __init__(self, progress: Progress, *, what: str) -> None:
        self._throttle, self._what = Throttle(progress), what

    def say(self, message: str) -> None:
        self._throttle(f"{self._what}: {message}")

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return what describes a model in a line."""
    shown = PARTS_SHOWN if config.parts is not None else TOWERS_SHOWN
    return {name: getattr(config.parts or config.model, name) for name in shown} | {
        "num_steps": config.optimizer.num_steps,
        "batch_users": config.batch_users,
        "precision": config.precision,
    }


def _describe(
    wanted: TrainConfig,
    planned: TrainConfig,
    config: TrainConfig,
    *,
    chosen_steps: int | None,
    num_popular: int,
    budget_s: float,
) -> str:
    steps, all_steps = config.optimizer.num_steps, wanted.optimizer.num_steps
    parts = [f"{steps:,} steps" if steps == all_steps else f"{steps:,} of {all_steps:,} steps"]
    if steps < planned.optimizer.num_steps:
        parts.append(f"because {budget_s:.0f} s do not suffice for {planned.optimizer.num_steps:,} on this machine")
    if config.batch_users != wanted.batch_users:
        parts.append(f"batches of {config.batch_users:,} users instead of {wanted.batch_users:,}")
    if chosen_steps is not None:
        parts.append(f"step {chosen_steps:,} is the best for the validation users")
    if num_popular:
        parts.append(f"{num_popular:,} test users without an embedding get the popular list")
    return ", ".join(parts)


# Content vectors


def content_vectors(site: Site, log: BenchmarkLog) -> np.ndarray:
    """Return the content vector of each pin of the log's index at the cut; rows of pins without one are NaN.

    The vectors have no numbers at all if the site has none.
    """
    pins = read_pin_features(site, log.cut_ds, ["pin_id", "feature", "has_feature"])
    pins = pins.filter(pins["has_feature"])
    row = pc.index_in(pins["pin_id"].combine_chunks(), value_set=log.pin_ids).fill_null(-1)
    row = row.to_numpy(zero_copy_only=False)
    feature = finite_features(pins, log.cut_ds)
    vector_NF = np.full((len(log.pin_ids), feature.shape[1]), np.nan, np.float32)
    vector_NF[row[row >= 0]] = feature[row >= 0]
    return vector_NF


def positives_without_vector(log: BenchmarkLog, has_vector_N: np.ndarray) -> float:
    """Return the share of all positives, askable or not, whose pin has no vector in the index; NaN without any."""
    num_all = len(log.positive_pin_P) + int(log.num_unaskable_U.sum())
    return 1 - int(has_vector_N[log.positive_pin_P].sum()) / num_all if num_all else math.nan


def actions_without_vector(log: BenchmarkLog, has_vector_N: np.ndarray) -> float:
    """Return the share of the test users' actions before the cut whose pin has no vector; NaN without any."""
    return 1 - float(has_vector_N[log.past.pin].mean()) if len(log.past.pin) else math.nan
