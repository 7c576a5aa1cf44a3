"""The paper's claims on the parts of the model: tasks, features, sizes, masking, SASRec's losses (sections 3.4, 4.2.5
to 4.2.7, appendix A.4), and claims of ours. `paper_claims` explains how words become statistics."""

from collections.abc import Sequence

from pf_core.config.serving import Frequency
from pf_core.config.training import ModelConfig
from pf_core.experiments.claims import (
    COLLAPSE,
    FEATURES,
    LONGER_RECIPES,
    SASREC_LOSSES,
    Claim,
    Part,
    alike,
    best,
    greater,
    no_better,
)
from pf_core.experiments.families import (
    HIDDEN_DIMS,
    LAYERS,
    recipe_of_capacity,
    recipe_of_type,
    recipes_by_dim,
    recipes_by_heads,
    recipes_by_length,
)
from pf_core.experiments.quantities import coverage, entropy, gain_per_doubling, mean, recall, slope
from pf_core.experiments.recipe import BASE

TURN_OF_LENGTH = 32
"""Sequence length from which on, according to the paper, gains diminish."""

TURN_OF_DIM = 32
"""The middle of our range of dimensions, in doublings."""


def ablation_claims(base: ModelConfig, tasks: Sequence[str]) -> list[Claim]:
    return [
        *(_multi_task(tasks) if len(tasks) > 1 else []),
        *_features(),
        *_sequence_length(base),
        *_embedding_dimension(base),
        *_architecture(base),
        *_sasrec_losses(),
        *_masking_and_selection(),
        *_training_budget(),
        *_ours(),
    ]


def _multi_task(tasks: Sequence[str]) -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="multi-task", where="Table 5, 4.2.5", says=says, parts=parts)

    models = [recipe_of_type(task) for task in tasks]
    others = {task: [model for model in models if model != recipe_of_type(task)] for task in tasks}
    return [
        claim(
            "single-task-best",
            "A model that learns from one action type alone is the best at predicting that type.",
            *(
                part
                for task in tasks
                for part in best(
                    recall(recipe_of_type(task), task=task),
                    [recall(model, task=task) for model in (BASE, *others[task])],
                )
            ),
        ),
        claim(
            "multi-task-best-overall",
            "The multi-task model has the highest overall recall.",
            *best(recall(BASE), [recall(model) for model in models]),
        ),
        claim(
            "multi-task-second",
            "At predicting any type, the multi-task model is better than those that learn from other types.",
            *(
                part
                for task in tasks
                for part in best(recall(BASE, task=task), [recall(model, task=task) for model in others[task]])
            ),
        ),
    ]


def _features() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="features", where="Table 6, 4.2.6", says=says, parts=parts)

    content, timestamp, *others = FEATURES
    return [
        *(
            claim(
                f"feature-{recipe.removeprefix('no_').replace('_', '-')}",
                f"Removing {name} lowers the recall.",
                greater(recall(BASE), recall(recipe)),
            )
            for recipe, name in FEATURES.items()
        ),
        claim(
            "feature-content-first",
            "No feature contributes as much as the content vector (PinSage).",
            *(greater(recall(other), recall(content)) for other in (timestamp, *others)),
        ),
        claim(
            "feature-timestamp-second",
            "After the content vector, the timestamp contributes most.",
            *(greater(recall(other), recall(timestamp)) for other in others),
        ),
        claim(
            "feature-content-collapse",
            "Without the content vector, results are similar for all users (less than a tenth of the coverage).",
            greater(coverage(BASE), COLLAPSE * coverage(content)),
        ),
    ]


def _sequence_length(base: ModelConfig) -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="sequence-length", where="Figure on sequence length, 4.2.7", says=says, parts=parts)

    recalls = {length: recall(recipe) for length, recipe in recipes_by_length(base).items()}
    coverages = {
        length: coverage(recipe) for length, recipe in recipes_by_length(base).items() if length <= TURN_OF_LENGTH
    }
    before = gain_per_doubling(recalls, min(recalls), TURN_OF_LENGTH)
    after = gain_per_doubling(recalls, TURN_OF_LENGTH, max(recalls))
    return [
        claim(
            "longer-is-better",
            "Longer sequences raise the recall.",
            Part("greater", slope(recalls), recall(BASE)),
        ),
        claim(
            "longer-coverage",
            f"Up to {TURN_OF_LENGTH} actions, longer sequences raise the coverage.",
            Part("greater", slope(coverages), coverage(BASE)),
        ),
        claim(
            "longer-diminishing",
            f"The returns of longer sequences diminish beyond {TURN_OF_LENGTH} actions.",
            Part("greater", before - after, recall(BASE)),
        ),
    ]


def _embedding_dimension(base: ModelConfig) -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(
            id=id, section="embedding-dimension", where="Figure on embedding dimension, A.4.2", says=says, parts=parts
        )

    recalls = {dim: recall(recipe) for dim, recipe in recipes_by_dim(base).items()}
    coverages = {dim: coverage(recipe) for dim, recipe in recipes_by_dim(base).items()}
    before = gain_per_doubling(recalls, min(recalls), TURN_OF_DIM)
    after = gain_per_doubling(recalls, TURN_OF_DIM, max(recalls))
    return [
        claim(
            "wider-is-better",
            "Larger embeddings raise the recall.",
            Part("greater", slope(recalls), recall(BASE)),
        ),
        claim(
            "wider-diminishing",
            f"The returns of larger embeddings diminish (here: beyond {TURN_OF_DIM} numbers).",
            Part("greater", before - after, recall(BASE)),
        ),
        claim(
            "wider-coverage",
            "Small embeddings tend to retrieve the same results for many users.",
            Part("greater", slope(coverages), coverage(BASE)),
        ),
        claim(
            "narrow-entropy",
            "At small dimensions a user's own results can be more diverse.",
            greater(entropy(recipes_by_dim(base)[min(recalls)]), entropy(BASE)),
        ),
    ]


def _architecture(base: ModelConfig) -> list[Claim]:
    by_layers = {
        layers: mean([recall(recipe_of_capacity(base, layers, hidden)) for hidden in HIDDEN_DIMS]) for layers in LAYERS
    }
    by_hidden = {
        hidden: mean([recall(recipe_of_capacity(base, layers, hidden)) for layers in LAYERS]) for hidden in HIDDEN_DIMS
    }
    return [
        Claim(
            id="more-layers",
            section="capacity",
            where="Table 9, A.4.3",
            says="More layers raise the recall.",
            parts=(greater(by_layers[LAYERS[-1]], by_layers[LAYERS[0]]),),
        ),
        Claim(
            id="larger-hidden",
            section="capacity",
            where="Table 9, A.4.3",
            says="A larger hidden dimension raises the recall.",
            parts=(greater(by_hidden[HIDDEN_DIMS[-1]], by_hidden[HIDDEN_DIMS[0]]),),
        ),
        Claim(
            id="heads-alike",
            section="heads",
            where="A.4.3",
            says="The number of heads makes no substantial difference.",
            parts=tuple(
                alike(recall(recipe), recall(BASE)) for recipe in recipes_by_heads(base).values() if recipe != BASE
            ),
        ),
    ]


def _sasrec_losses() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="sasrec-losses", where="Table 10, A.4.4", says=says, parts=parts)

    bce, unweighted, weighted = SASREC_LOSSES
    return [
        claim(
            "softmax-over-bce",
            "Sampled softmax trains a better SASRec than binary cross-entropy.",
            greater(recall(unweighted), recall(bce)),
        ),
        claim(
            "e1-weight-helps",
            "Giving the newest embedding's loss equal weight improves SASRec.",
            greater(recall(weighted), recall(unweighted)),
        ),
        claim(
            "bce-coverage",
            "Binary cross-entropy has the highest coverage of the three, equal e₁ weight the lowest.",
            greater(coverage(bce), coverage(unweighted)),
            greater(coverage(unweighted), coverage(weighted)),
        ),
    ]


def _masking_and_selection() -> list[Claim]:
    return [
        Claim(
            id="causal-mask-helps",
            section="masking",
            where="3.4.3",
            says="Causal masking substantially improves dense all action.",
            parts=(greater(recall(BASE), recall("no_causal_mask")),),
        ),
        Claim(
            id="sparser-no-better",
            section="sequence-selection",
            where="A.4.1",
            says="Removing weaker engagement from the sequences brings no significant gain.",
            parts=(no_better(recall("strong_actions_only"), recall(BASE)),),
        ),
    ]


def _training_budget() -> list[Claim]:
    sasrec, ours = LONGER_RECIPES
    adverbs: dict[Frequency, str] = {"once": "once", "daily": "daily", "realtime": "in realtime"}
    return [
        Claim(
            id=f"longer-beats-sasrec-{frequency}",
            section="training-budget",
            where="ours",
            says=f"After 2.5 times the steps, inferred {adverb}, PinnerFormer retrieves more than SASRec.",
            parts=(greater(recall(ours, frequency), recall(sasrec, frequency)),),
            is_ours=True,
        )
        for frequency, adverb in adverbs.items()
    ]


def _ours() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="ours", where="ours", says=says, parts=parts, is_ours=True)

    return [
        claim(
            "ours-beats-popularity",
            "PinnerFormer retrieves more than popularity, recent or overall.",
            *best(recall(BASE), [recall("popularity_7d"), recall("popularity_ever")]),
        ),
        claim(
            "ours-beats-mean",
            "PinnerFormer retrieves more than the mean of recent pins' content vectors.",
            *best(recall(BASE), [recall("mean_of_20"), recall("mean_of_100")]),
        ),
        claim(
            "ours-beats-sasrec-variants",
            "PinnerFormer retrieves more than every variant of SASRec.",
            *best(recall(BASE), [recall(recipe) for recipe in SASREC_LOSSES]),
        ),
        claim(
            "ours-near-identity",
            "Starting both towers near the identity raises the recall within this budget.",
            greater(recall(BASE), recall("default_init")),
        ),
        claim(
            "ours-log-q-negatives",
            "Correcting the negatives alone does as well as correcting the positive too.",
            alike(recall("log_q_negatives"), recall(BASE)),
        ),
        claim(
            "ours-relative-time",
            "Without the two relative times the model does as well.",
            alike(recall("no_relative_time"), recall(BASE)),
        ),
    ]
