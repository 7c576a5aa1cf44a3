"""The experiments: a recipe takes the site's own configuration and changes what it claims to change, nothing else.

The base of all recipes, `pinnerformer`, is the model of the site file's training section, so that all have the same
budget; where that says preset auto, which trains no towers, it is preset demo. A recipe that is equal to the base, or
that is not a valid model on this base (a width that its heads do not divide), does not exist at a site. Sizes come
from `families`, as those of claims and tables do.

The function's name is the recipe's name, and its docstring is shown as the reason for the recipe.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, get_args

from pydantic import ValidationError

from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.experiments.families import (
    HIDDEN_DIMS,
    LAYERS,
    recipe_of_capacity,
    recipe_of_type,
    recipes_by_dim,
    recipes_by_heads,
    recipes_by_length,
)
from pf_core.experiments.recipe import BASE, BASELINES, Change, Experiment, Recipe, Set, changed

CONTENT_NOISES = (0, 1, 2, 4)
"""Noise as a multiple of the norm of a content vector."""

LONGER = 2.5
"""Number of steps as a multiple of the base's."""


def pinnerformer(base: TrainConfig) -> TrainConfig:
    """The model of the site file, which all others are compared with."""
    return base


# Table 3: training objectives


def next_action(base: TrainConfig) -> TrainConfig:
    """Only the newest embedding, only the very next action."""
    return _sampling(base, objective="next_action")


def sasrec(base: TrainConfig) -> TrainConfig:
    """The next action at every position, with the paper's softmax and equal weight for the newest embedding (A.4.4)."""
    return _sampling(base, objective="sasrec", equal_e1_weight=True)


def all_action(base: TrainConfig) -> TrainConfig:
    """Only the newest embedding, all actions of the window."""
    return _sampling(base, objective="all_action")


def dense_all_action_14d(base: TrainConfig) -> TrainConfig:
    """A window as long as the evaluation's, half the base's."""
    return _sampling(base, objective="dense_all_action", window_days=14.0)


def summed_objectives(base: TrainConfig) -> TrainConfig:
    """Dense all action and SASRec together: does the next action add anything?"""
    return _sampling(base, objective="summed")


# Table 4: negatives and the correction of their sampling probability


def random_uncorrected(base: TrainConfig) -> TrainConfig:
    """Random negatives alone."""
    return _loss(base, negatives="random", log_q="none")


def in_batch_uncorrected(base: TrainConfig) -> TrainConfig:
    """In-batch negatives alone, which punish popular pins."""
    return _loss(base, negatives="in_batch", log_q="none")


def mixed_uncorrected(base: TrainConfig) -> TrainConfig:
    """Both kinds of negatives, without the correction."""
    return _loss(base, negatives="mixed", log_q="none")


def random_corrected(base: TrainConfig) -> TrainConfig:
    """Random negatives all have the same probability, so that the correction should change nothing."""
    return _loss(base, negatives="random", log_q="all")


def in_batch_corrected(base: TrainConfig) -> TrainConfig:
    """In-batch negatives with the correction."""
    return _loss(base, negatives="in_batch", log_q="all")


# Table 6: the input without one of its parts


def no_pin_feature(base: TrainConfig) -> TrainConfig:
    """Without the content vectors of the pins."""
    return _without(base, "pin_feature")


def no_timestamp(base: TrainConfig) -> TrainConfig:
    """Without any notion of time."""
    return _without(base, "absolute_time", "since_latest", "gap")


def no_surface(base: TrainConfig) -> TrainConfig:
    """Without the surface on which the action happened."""
    return _without(base, "surface")


def no_action_type(base: TrainConfig) -> TrainConfig:
    """Without the kind of action."""
    return _without(base, "action_type")


def no_duration(base: TrainConfig) -> TrainConfig:
    """Without the duration of the action."""
    return _without(base, "duration")


def no_position(base: TrainConfig) -> TrainConfig:
    """Without the positional encoding: the order of actions is known by their times alone."""
    return _without(base, "position")


# SASRec's losses and sequence selection (A.4), masking (section 3.4)


def sasrec_bce(base: TrainConfig) -> TrainConfig:
    """SASRec as published: binary cross-entropy against one negative, every position has the same weight."""
    changed = _sampling(base, objective="sasrec", equal_e1_weight=False)
    return _loss(changed, kind="bce", log_q="none")


def sasrec_unweighted(base: TrainConfig) -> TrainConfig:
    """SASRec with the softmax, every position has the same weight."""
    return _sampling(base, objective="sasrec", equal_e1_weight=False)


def no_causal_mask(base: TrainConfig) -> TrainConfig:
    """Every position sees the whole sequence, and inner ones their own targets."""
    return _model(base, is_causal=False)


def strong_actions_only(base: TrainConfig, positive_types: tuple[str, ...]) -> TrainConfig:
    """Sequences of strong actions only reach back further; are they better?"""
    return _model(base, sequence_types=positive_types)


# Families: one size of the base, or its action types, take other values


def only(base: TrainConfig, action_type: str) -> TrainConfig:
    """Learns from the positives of one action type (Table 5)."""
    return _sampling(base, positive_types=(action_type,))


def length(base: TrainConfig, sequence_length: int) -> TrainConfig:
    """Another number of actions in a sequence (section 4.2.7)."""
    return _model(base, sequence_length=sequence_length)


def dim(base: TrainConfig, embedding_dim: int) -> TrainConfig:
    """Embeddings of another size (A.4)."""
    return _model(base, embedding_dim=embedding_dim)


def capacity(base: TrainConfig, num_layers: int, hidden_dim: int) -> TrainConfig:
    """A transformer of another size (A.4)."""
    return _model(base, num_layers=num_layers, hidden_dim=hidden_dim)


def heads(base: TrainConfig, num_heads: int) -> TrainConfig:
    """Another number of attention heads (A.4)."""
    return _model(base, num_heads=num_heads)


# Ours beyond the paper


def log_q_negatives(base: TrainConfig) -> TrainConfig:
    """The correction of the negatives' logits alone, as many libraries do it."""
    return _loss(base, log_q="negatives")


def default_init(base: TrainConfig) -> TrainConfig:
    """The layers' default weights, instead of towers that start by passing the content vector through."""
    return _model(base, near_identity_init=False)


def longer(base: TrainConfig, of: Change) -> TrainConfig:
    """The same, trained longer: is the order of models the same?"""
    changed_base = of(base)
    num_steps = round(LONGER * base.optimizer.num_steps)
    return changed(changed_base, optimizer=changed_base.optimizer.model_dump() | {"num_steps": num_steps})


def noise(base: TrainConfig) -> TrainConfig:
    """The base and PinnerSage with noisy content vectors: does a learned embedding depend on them less?"""
    return base


def no_relative_time(base: TrainConfig) -> TrainConfig:
    """Without the time from an action to the newest action and to the action before it."""
    return _without(base, "since_latest", "gap")


def experiments(site: Site) -> dict[str, Experiment]:
    """Return all experiments of a site by name, the most important first."""
    base, positive_types = site.training.towers_config, site.source.positive.action_types
    found = [recipe for recipe in _recipes(base, positive_types) if _exists(recipe, base)]
    everything: list[Experiment] = [*found, *BASELINES]
    return {experiment.name: experiment for experiment in sorted(everything, key=_rank)}


def recipes(site: Site) -> dict[str, Recipe]:
    """Return the experiments that are trained."""
    return {name: recipe for name, recipe in experiments(site).items() if isinstance(recipe, Recipe)}


def _rank(experiment: Experiment) -> tuple[bool, int]:
    """Sort key: the base comes first, then the experiments of the first set, and so on."""
    return experiment.name != BASE, min(get_args(Set).index(name) for name in experiment.sets)


def _recipes(base: TrainConfig, positive_types: tuple[str, ...]) -> Iterable[Recipe]:
    """All recipes that claims, tables and figures name on this base; some may not be valid models."""
    with_base: tuple[Set, ...] = tuple(name for name in get_args(Set) if name != "sasrec-losses")
    yield _named(pinnerformer, *with_base)
    yield _named(sasrec, "model-comparison", "batch-vs-realtime", "objectives", "sasrec-losses")
    for change in (next_action, all_action, dense_all_action_14d, summed_objectives):
        yield _named(change, "objectives")
    for change in (
        *(random_uncorrected, in_batch_uncorrected, mixed_uncorrected),
        *(random_corrected, in_batch_corrected),
    ):
        yield _named(change, "negatives")
    if len(positive_types) > 1:
        for action_type in positive_types:
            yield _of_family(only, "multi-task", name=recipe_of_type(action_type), action_type=action_type)
    for change in (no_pin_feature, no_timestamp, no_surface, no_action_type, no_duration, no_position):
        yield _named(change, "features")
    for change in (sasrec_unweighted, sasrec_bce):
        yield _named(change, "sasrec-losses")
    yield _named(no_causal_mask, "masking")
    for change in (pinnerformer, sasrec):
        yield _of_family(longer, "training-budget", name=f"longer_{change.__name__}", of=change)
    for sequence_length, name in recipes_by_length(base.model).items():
        if name != BASE:
            yield _of_family(length, "sequence-length", name=name, sequence_length=sequence_length)
    for embedding_dim, name in recipes_by_dim(base.model).items():
        if name != BASE:
            yield _of_family(dim, "embedding-dimension", name=name, embedding_dim=embedding_dim)
    for num_layers, hidden_dim in product(LAYERS, HIDDEN_DIMS):
        name = recipe_of_capacity(base.model, num_layers, hidden_dim)
        if name != BASE:
            yield _of_family(capacity, "capacity", name=name, num_layers=num_layers, hidden_dim=hidden_dim)
    if positive_types:
        name = strong_actions_only.__name__
        yield _of_family(strong_actions_only, "sequence-selection", name=name, positive_types=positive_types)
    for num_heads, name in recipes_by_heads(base.model).items():
        if name != BASE:
            yield _of_family(heads, "heads", name=name, num_heads=num_heads)
    for times in CONTENT_NOISES:
        name = f"noise_{times}"
        yield Recipe(name=name, why=_why(noise), change=noise, sets=("content-noise",), content_noise=times)
    for change in (log_q_negatives, default_init, no_relative_time):
        yield _named(change, "ours")


def _named(change: Change, *sets: Set) -> Recipe:
    return Recipe(name=change.__name__, why=_why(change), change=change, sets=sets)


def _of_family(change: Callable[..., TrainConfig], *sets: Set, name: str, **numbers: Any) -> Recipe:
    return Recipe(name=name, why=_why(change), change=partial(change, **numbers), sets=sets)


def _why(change: Callable[..., TrainConfig]) -> str:
    assert change.__doc__ is not None
    return change.__doc__


def _exists(recipe: Recipe, base: TrainConfig) -> bool:
    try:
        return recipe.name == BASE or recipe.content_noise is not None or recipe.change(base) != base
    except ValidationError:  # not a valid model on this base
        return False


def _model(base: TrainConfig, **changes: Any) -> TrainConfig:
    return changed(base, model=base.model.model_dump() | changes)


def _without(base: TrainConfig, *parts: str) -> TrainConfig:
    return _model(base, features=base.model.features.model_dump() | dict.fromkeys(parts, False))


def _sampling(base: TrainConfig, **changes: Any) -> TrainConfig:
    return changed(base, sampling=base.sampling.model_dump() | changes)


def _loss(base: TrainConfig, **changes: Any) -> TrainConfig:
    return changed(base, loss=base.loss.model_dump() | changes)
