"""A candidate against the champion: judged alike on the days after the cut (paper, section 4.1), then decided by rule.

Both embed the same held-out users as of the current training set's cut, and look for the same later positives in the
same index of random candidates; baselines that learn nothing stand beside them. A model may be older than the training
set: its own vocabularies then code the actions, and an action with a word that it does not know is left out, as when it
serves. A user who is left without any action gets no embedding from it: nothing is found for her, and she is counted.

Memory: the index's embeddings (`num_pins` of them), and of the users a chunk at a time.

Suffixes: U users, A actions, P positives, K results of a user, N pins of the index, D embedding.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pf_core.batches import collate_sequences
from pf_core.checkpoint import load_model
from pf_core.contracts import PipelineError, parse_ds, shift_ds
from pf_core.diversity import p90_coverage, top_k
from pf_core.evaluation import Future, MeanOfRecent, at_the_cut, baselines, read_future
from pf_core.packing import command
from pf_core.raw_actions import ingested_days
from pf_core.recall import recall_at_k
from pf_core.serving_config import PromotionConfig
from pf_core.site import Site
from pf_core.training_set import Timelines, TrainingSet, sample_below
from pf_core.validation import CHUNK_USERS, Embedder, HeldOut, ModelEmbedder

K = 10
MAX_DAYS = 14
POPULAR_DAYS = (7, 365)
RECENT = (20, 100)
SEED = 0
NUM_BOOTSTRAPS = 2000
CHUNK_PINS = 8192
SCORES_AT_ONCE = 1 << 26
SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model or a baseline, and what it reads of a timeline."""

    name: str
    embedder: Embedder
    sequence_length: int
    action_types: Sequence[str]
    surfaces: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How a contender did."""

    name: str
    recall_at_10: float
    recall_interval: tuple[float, float]
    """95 % of the bootstraps over users."""
    p90_coverage_at_10: float
    users_without_embedding: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was asked, what could not be, and how everybody did."""

    training_set: str
    cut_ds: str
    last_ds: str
    num_users: int
    num_positives: int
    num_pins: int
    num_unknown_users: int
    """As Future has them: positives of users, and of users' pins, that were not there at the cut."""
    num_unknown_pins: int
    models: dict[str, Judged]
    baselines: dict[str, Judged]


@dataclass(frozen=True, kw_only=True)
class Decision:
    promote: bool
    reason: str


def decide(candidate: Judged, champion: Judged | None, config: PromotionConfig) -> Decision:
    """Promote, unless the candidate loses a larger share of the champion's recall or coverage than is tolerated."""
    if champion is None:
        return Decision(promote=True, reason="there is no champion yet")
    if candidate.name == champion.name:
        return Decision(promote=False, reason=f"{candidate.name} is the champion already")
    figures, faults = [], []
    for metric, ours, theirs, tolerance in (
        ("recall@10", candidate.recall_at_10, champion.recall_at_10, config.recall_tolerance),
        ("P90 coverage@10", candidate.p90_coverage_at_10, champion.p90_coverage_at_10, config.coverage_tolerance),
    ):
        figures.append(f"{metric} {ours:.4f} against the champion's {theirs:.4f}")
        least = (1 - tolerance) * theirs
        if ours < least or math.isnan(ours):
            faults.append(f"{figures[-1]}, of which it may lose {100 * tolerance:g} %: it needs {least:.4f}")
    return Decision(promote=not faults, reason="; ".join(faults or figures))


def evaluate_models(
    site: Site, data: TrainingSet, models: Mapping[str, Path], *, progress: Callable[[str], None]
) -> Evaluation:
    """Judge the models in these folders, and the baselines, by the days after the training set's cut."""
    config, cut_ds = site.serving.promotion, str(data.manifest["cut_ds"])
    last_ds = _last_day(site, cut_ds)
    contenders = [_open_model(name, path, data, _device(site)) for name, path in models.items()]
    num_days = (parse_ds(last_ds) - parse_ds(cut_ds)).days
    future = _sample_users(read_future(site, data, num_days), config.num_users)
    whole_timelines = len(data.held_out.ts)  # each contender cuts its own sequences from them
    held_out = at_the_cut(data, future, sequence_length=whole_timelines, num_pins=config.num_pins, seed=SEED)
    progress(
        f"{held_out.num_users:,} held-out users, {len(future.user):,} positives in {num_days} days after {cut_ds}, "
        f"index of {len(held_out.index_pin):,} pins"
    )
    judged: dict[str, Judged] = {}
    for contender in [*contenders, *_open_baselines(data)]:
        result = judge(contender, held_out, progress=progress)
        judged[contender.name] = result
        progress(f"{result.name}: recall@10 {result.recall_at_10:.4f}, P90 coverage@10 {result.p90_coverage_at_10:.4f}")
    return Evaluation(
        training_set=data.fingerprint,
        cut_ds=cut_ds,
        last_ds=last_ds,
        num_users=held_out.num_users,
        num_positives=len(future.user),
        num_pins=len(held_out.index_pin),
        num_unknown_users=future.num_unknown_users,
        num_unknown_pins=future.num_unknown_pins,
        models={name: result for name, result in judged.items() if name in models},
        baselines={name: result for name, result in judged.items() if name not in models},
    )


def _last_day(site: Site, cut_ds: str) -> str:
    newest_ds = max(ingested_days(site), default=cut_ds)
    if newest_ds <= cut_ds:
        raise PipelineError(
            f"the training set ends with {cut_ds}, and raw_actions has no day after it to judge by. Ingest later days, "
            "or end training earlier: set training.evaluation_days in the site file, then: "
            f"{command('training_set,pinnerformer_model')}"
        )
    return min(newest_ds, shift_ds(cut_ds, MAX_DAYS))


def _sample_users(future: Future, num_users: int) -> Future:
    users = np.unique(future.user)
    chosen = users[sample_below(len(users), num_users, np.random.default_rng([SEED, 0x5A3]))]
    is_chosen = np.isin(future.user, chosen)
    return future._replace(user=future.user[is_chosen], pin=future.pin[is_chosen])


def _device(site: Site) -> torch.device:
    wanted = site.serving.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def _open_model(name: str, path: Path, data: TrainingSet, device: torch.device) -> Contender:
    model, description = load_model(path)
    cut_ds, feature_dim = data.manifest["cut_ds"], data.pin_feature.shape[1]
    if description["cut_ds"] > cut_ds:
        raise PipelineError(
            f"model {name} was trained on days until {description['cut_ds']}, and the training set ends with {cut_ds}: "
            f"the days after that would not judge it fairly. Make a newer training set: {command('training_set')}"
        )
    if model.feature_dim != feature_dim:
        raise PipelineError(
            f"model {name} reads vectors of {model.feature_dim} numbers, the training set has {feature_dim}: it "
            "cannot be judged. If the site's vectors have changed for good, promote a model that reads them with: "
            "pf promote VERSION --because TEXT"
        )
    return Contender(
        name=name,
        embedder=ModelEmbedder(model=model.to(device), data=data, device=device),
        sequence_length=model.config.sequence_length,
        action_types=description["action_types"],
        surfaces=description["surfaces"],
    )


def _open_baselines(data: TrainingSet) -> list[Contender]:
    return [
        Contender(
            name=name,
            embedder=embedder,
            sequence_length=embedder.num_actions if isinstance(embedder, MeanOfRecent) else 1,
            action_types=data.action_types,
            surfaces=data.surfaces,
        )
        for name, embedder in baselines(data, popular_days=POPULAR_DAYS, recent=RECENT).items()
    ]


@torch.inference_mode()
def judge(contender: Contender, held_out: HeldOut, *, progress: Callable[[str], None]) -> Judged:
    """Recall and coverage of one contender; `held_out` names whole timelines, of which it reads what it knows."""
    embedder, num_users = contender.embedder, len(held_out.starts)
    index_ND = _embed_pins(embedder, held_out.index_pin)
    scored_users = max(1, SCORES_AT_ONCE // len(index_ND))
    by_user = np.argsort(held_out.positive_user, kind="stable")
    user_P, pin_P = held_out.positive_user[by_user], held_out.positive_pin[by_user]
    recalls, tops, said_at = [], [], time.monotonic()
    for first in range(0, num_users, CHUNK_USERS):
        last = min(first + CHUNK_USERS, num_users)
        sequences = cut_sequences(contender, held_out.data, held_out.starts[first:last], held_out.ends[first:last])
        has_any_U = torch.from_numpy(np.diff(sequences.offsets) > 0)
        user_UD = torch.zeros(last - first, index_ND.shape[1])
        if has_any_U.any():
            user_UD[has_any_U] = _embed_users(embedder, held_out.data, sequences)
        theirs = slice(*np.searchsorted(user_P, (first, last)))
        recall_U = recall_at_k(
            user_UD,
            torch.from_numpy(user_P[theirs] - first),
            torch.from_numpy(pin_P[theirs]),
            _embed_pins(embedder, pin_P[theirs]),
            torch.from_numpy(held_out.index_pin),
            index_ND,
            k=K,
            chunk_users=scored_users,
        )
        recalls.append(torch.where(has_any_U, recall_U, 0.0))
        tops.append(top_k(user_UD[has_any_U], index_ND, k=K, chunk_users=scored_users))
        if time.monotonic() > said_at + SAY_EVERY_S:
            said_at = time.monotonic()
            progress(f"{contender.name}: {last:,} of {num_users:,} users judged")
    recall_U, top_UK = torch.cat(recalls), torch.cat(tops)
    return Judged(
        name=contender.name,
        recall_at_10=float(recall_U.mean()),
        recall_interval=bootstrap_interval(recall_U.numpy()),
        p90_coverage_at_10=p90_coverage(top_UK, index_size=len(index_ND)),
        users_without_embedding=num_users - len(top_UK),
    )


def cut_sequences(contender: Contender, data: TrainingSet, start_U: np.ndarray, end_U: np.ndarray) -> Timelines:
    """Of held-out timelines, the newest actions whose words the contender knows, in its codes; perhaps none of some."""
    timelines, length_U = data.held_out, end_U - start_U + 1
    user_A = np.repeat(np.arange(len(start_U)), length_U)
    from_newest_A = np.cumsum(length_U)[user_A] - 1 - np.arange(len(user_A))
    action_A = end_U[user_A] - from_newest_A
    code_A = {
        "action_type": _recode(data.action_types, contender.action_types)[timelines.action_type[action_A]],
        "surface": _recode(data.surfaces, contender.surfaces)[timelines.surface[action_A]],
    }
    is_known_A = (code_A["action_type"] >= 0) & (code_A["surface"] >= 0)
    known_U = np.bincount(user_A, is_known_A, minlength=len(start_U)).astype(np.int64)
    newer_known_A = np.cumsum(known_U)[user_A] - np.cumsum(is_known_A)
    is_kept_A = is_known_A & (newer_known_A < contender.sequence_length)
    kept = action_A[is_kept_A]
    return Timelines(
        offsets=np.concatenate([[0], np.cumsum(np.minimum(known_U, contender.sequence_length))]),
        pin=timelines.pin[kept],
        ts=timelines.ts[kept],
        duration=timelines.duration[kept],
        is_positive=timelines.is_positive[kept],
        **{name: code[is_kept_A] for name, code in code_A.items()},
    )


def _recode(words: Sequence[str], known: Sequence[str]) -> np.ndarray:
    """By code of the training set, that of the contender; -1 if it does not know the word."""
    codes = {word: code for code, word in enumerate(known)}
    return np.array([codes.get(word, -1) for word in words], np.int16)


def _embed_users(embedder: Embedder, data: TrainingSet, sequences: Timelines) -> Tensor:
    """Of those users who have an action."""
    has_any = np.diff(sequences.offsets) > 0
    starts, ends = sequences.offsets[:-1][has_any], sequences.offsets[1:][has_any] - 1
    return embedder.users(collate_sequences(sequences, data.pin_feature, starts, ends))


def _embed_pins(embedder: Embedder, pin_N: np.ndarray) -> Tensor:
    """Each chunk straight into its place: the index is the largest thing here, and is never held twice."""
    result_ND = torch.empty(len(pin_N), embedder.pins(pin_N[:1]).shape[1])
    for start in range(0, len(pin_N), CHUNK_PINS):
        result_ND[start : start + CHUNK_PINS] = embedder.pins(pin_N[start : start + CHUNK_PINS])
    return result_ND


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """What 95 % of the means of as many values, drawn with replacement, lie between; the same draws at every call."""
    rng = np.random.default_rng(SEED)
    means = [rng.choice(values, len(values)).mean() for _ in range(NUM_BOOTSTRAPS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
