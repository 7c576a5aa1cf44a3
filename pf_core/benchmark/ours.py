"""Our own rows of the benchmark: the product's model, trained on the log as the product trains it.

The model sees the training set that ends with the cut, and nothing else. The test users are embedded from their actions
before the cut, with the vectors that serving would store (before their rounding to float16), and every pin with a
content vector is ranked by exact search. A pin without a content vector has no place in a list: the shares of such
positives and actions are part of the result.

A number of steps (`max_steps`) below the configuration's own gives the same model at every run with the same seed. Time
is a second limit, for slow machines (`budget.py`). The note reports each such change.

Suffixes: U test users, V users with a vector, N pins with a vector, F content, D embedding, K pins of a list.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pf_core.benchmark.budget import changed, fit_to_budget, seconds_per_step, with_steps
from pf_core.benchmark.log import BenchmarkLog, RankedLists, list_lengths
from pf_core.benchmark.stages import prepare_training_set
from pf_core.config.site import Site
from pf_core.config.training import Preset, TrainConfig
from pf_core.engine.base import Engine
from pf_core.evaluation.embedders import open_model_embedder
from pf_core.evaluation.question import Question
from pf_core.metrics.exact_search import search
from pf_core.model.device import choose_device
from pf_core.pins.features import read_pin_features
from pf_core.pins.packed import finite_features
from pf_core.progress import Progress, Throttle
from pf_core.storage.arrays import read_arrow
from pf_core.training.auto import Choice, describe_choice
from pf_core.training.plan import code_fingerprint, plan_config, resolve_config
from pf_core.training.trainer import train
from pf_core.training.training_set import (
    TrainingSet,
    open_training_set,
    read_training_set_manifest,
    refuse_without_content,
)

NUMBERS_AT_ONCE = 1 << 24
"""Numbers of the nearest pins' embeddings in memory at a time: 64 MB."""

TOWERS_SHOWN = ("num_layers", "hidden_dim", "embedding_dim", "sequence_length")
"""Settings that describe the towers in a line."""

PARTS_SHOWN = ("factor_dim", "content", "trend_dim", "memory", "transformer_layers", "window_days")
"""Settings that describe a model of parts in a line."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OurResult:
    """The lists of our model, and how they were made."""

    lists: RankedLists
    note: str
    seconds: float
    """Duration of training and embedding, without the stages that build the training set."""
    settings: dict[str, Any]
    """What describes the model and its training in a line."""
    share_of_positives_without_vector: float
    """Share of all positives, askable or not, whose pin has no content vector in the index."""
    share_of_actions_without_vector: float
    """Share of the test users' actions before the cut whose pin has no content vector."""


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

    pin_features must exist for the day of the cut. `max_steps` limits the steps of training, and `budget_s` the time of
    training and embedding. `folder` gets the model.
    """
    data = open_training_set(prepare_training_set(site, log.cut_ds, engine=engine, progress=progress))
    started = time.monotonic()
    wanted, chosen = _configuration(site, data.path, preset, seed)
    for choice in chosen:
        progress(describe_choice(choice))
    manifest = read_training_set_manifest(data.path)
    refuse_without_content(manifest, wanted, preset or site.training.preset)
    num_workers = site.training.launch.num_workers

    def measure(config: TrainConfig) -> float:
        return seconds_per_step(config, data, folder / "measured", num_workers)

    planned = with_steps(wanted, min(max_steps or wanted.optimizer.num_steps, wanted.optimizer.num_steps))
    config = fit_to_budget(planned, measure, budget_s=budget_s, num_test_users=len(log.test_user_ids))
    plan = plan_config(config, data.path, manifest, folder, code=code_fingerprint())
    planned_s = time.monotonic() - started
    trained = train(
        config,
        training_set=data.path,
        run_dir=plan.run_dir,
        num_workers=num_workers,
        observer=_Lines(progress, what="our model" if preset is None else f"preset {preset}"),
    )
    started = time.monotonic()
    lists = rank_pins(log, data, plan.run_dir / "model")
    has_vector_N = np.zeros(len(log.pin_ids), bool)
    has_vector_N[_pins_in_index(log, data)[1]] = True
    return OurResult(
        lists=lists,
        note=_describe(wanted, planned, config, int((np.diff(lists.offsets_U) == 0).sum()), budget_s=budget_s),
        seconds=planned_s + trained["seconds"] + time.monotonic() - started,  # the model may have been trained before
        settings={"preset": preset or site.training.preset} | _settings(config),
        share_of_positives_without_vector=positives_without_vector(log, has_vector_N),
        share_of_actions_without_vector=actions_without_vector(log, has_vector_N),
    )


# Training


def _configuration(
    site: Site, training_set: Path, preset: Preset | None, seed: int
) -> tuple[TrainConfig, list[Choice]]:
    """Return the site's configuration, or a preset, without what only costs time here and changes no weight.

    The settings that preset auto chose are returned, too. Presets are made for GPUs: on a CPU, bfloat16 is slower than
    float32, and compiling takes longer than the budget.
    """
    if preset is None:
        config, chosen = resolve_config(training_set, site.training.preset, site.training.changes)
    else:
        config, chosen = resolve_config(training_set, preset, {})
    changes: dict[str, Any] = {"seed": seed, "evaluate_users": 1, "evaluate_pins": 1}
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
    wanted: TrainConfig, planned: TrainConfig, config: TrainConfig, num_without_list: int, *, budget_s: float
) -> str:
    steps, all_steps = config.optimizer.num_steps, wanted.optimizer.num_steps
    parts = [f"{steps:,} steps" if steps == all_steps else f"{steps:,} of {all_steps:,} steps"]
    if steps < planned.optimizer.num_steps:
        parts.append(f"because {budget_s:.0f} s do not suffice for {planned.optimizer.num_steps:,} on this machine")
    if config.batch_users != wanted.batch_users:
        parts.append(f"batches of {config.batch_users:,} users instead of {wanted.batch_users:,}")
    if num_without_list:
        parts.append(f"{num_without_list:,} test users without an embedding have an empty list")
    return ", ".join(parts)


# Lists


def rank_pins(log: BenchmarkLog, data: TrainingSet, model: Path) -> RankedLists:
    """Embed the test users from their actions before the cut, and rank the pins of the index that have a vector."""
    row_U = _held_out_rows(log, data)
    has_past_U = row_U >= 0
    pin_row_N, log_pin_N = _pins_in_index(log, data)
    question = Question(
        data=data,
        user_ids=log.test_user_ids.filter(pa.array(has_past_U)),
        timelines=data.held_out,
        positive_A=np.zeros(0, np.int64),
        index_pin=pin_row_N,
        num_days=log.num_days,
        counts={},
    )
    embedder = open_model_embedder(question, model, name="benchmark", device=choose_device("auto"))
    user_V = row_U[has_past_U]
    with torch.no_grad():
        vectors = embedder.embed(user_V, data.held_out.offsets[user_V + 1])
        index_ND = _in_chunks(embedder.pins, pin_row_N)
    has_vector_U = has_past_U.copy()
    has_vector_U[has_past_U] = np.diff(vectors.offsets_Q) > 0
    return _lists(vectors.vector_VD, index_ND, log_pin_N, has_vector_U, list_lengths(log))


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


def _pins_in_index(log: BenchmarkLog, data: TrainingSet) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of pins with a content vector in the training set that are in the log's index, and their rows
    there."""
    ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    row = pc.index_in(ids, value_set=log.pin_ids).fill_null(-1).to_numpy(zero_copy_only=False)
    row = np.where(data.has_feature, row, -1)
    return np.flatnonzero(row >= 0), row[row >= 0].astype(np.int64)


def _held_out_rows(log: BenchmarkLog, data: TrainingSet) -> np.ndarray:
    """Return each test user's row among the held-out users; -1 for a user without an action that the set has."""
    rows = pc.index_in(log.test_user_ids, value_set=data.held_out.user_ids())
    return rows.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _in_chunks(embed: Callable[[np.ndarray], Tensor], pin_row_N: np.ndarray, *, rows: int = 8192) -> Tensor:
    return torch.cat([embed(pin_row_N[start : start + rows]) for start in range(0, max(1, len(pin_row_N)), rows)])


def _lists(
    vector_VD: Tensor, index_ND: Tensor, log_pin_N: np.ndarray, has_vector_U: np.ndarray, wanted_U: np.ndarray
) -> RankedLists:
    """Search the nearest pins of each vector; users without a vector have an empty list.

    Users with lists of about the same length are searched together. Scores are computed again for the pins found, one
    product at a time, so that pins with equal vectors have equal scores.
    """
    length_U = np.where(has_vector_U, np.minimum(wanted_U, len(index_ND)), 0)
    offsets_U = np.concatenate([[0], np.cumsum(length_U)])
    pin, score = np.zeros(offsets_U[-1], np.int32), np.zeros(offsets_U[-1], np.float32)
    user_V = np.flatnonzero(has_vector_U)
    by_length = np.argsort(length_U[user_V], kind="stable")
    none = torch.zeros(0, dtype=torch.int64)
    first = 0
    while first < len(by_length) and len(index_ND):
        k = int(length_U[user_V[by_length[min(first + 1023, len(by_length) - 1)]]])
        rows = by_length[first : first + max(1, min(1024, NUMBERS_AT_ONCE // (k * index_ND.shape[1])))]
        k = int(length_U[user_V[rows[-1]]])
        query_QD = vector_VD[torch.from_numpy(rows)]
        top_QK = search(
            query_QD,
            index_ND,
            index_pin_N=torch.arange(len(index_ND)),
            positive_query_P=none,
            positive_pin_P=none,
            positive_PD=index_ND[:0],
            k=k,
        ).top_QK
        score_QK = (query_QD[:, None] * index_ND[top_QK]).sum(-1)
        score_QK, order = score_QK.sort(dim=1, descending=True, stable=True)
        top_QK = top_QK.gather(1, order)
        for number, user in enumerate(user_V[rows].tolist()):
            theirs, length = slice(offsets_U[user], offsets_U[user + 1]), int(length_U[user])
            pin[theirs] = log_pin_N[top_QK[number, :length].numpy()]
            score[theirs] = score_QK[number, :length].numpy()
        first += len(rows)
    return RankedLists(offsets_U=offsets_U, pin=pin, score=score)
