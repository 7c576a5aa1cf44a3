"""The paper's offline tables and figures (section 4.2, appendix A.4): their numbers, and the recipe of each row.

The figures on sequence length and embedding dimension are printed without numbers. Where our sizes are not the
paper's, as in Table 9, a row stands for the same place in the range, and its label says so. Tables 7 and 8 are A/B
experiments on a site with users; nothing offline reproduces them.
"""

from collections.abc import Sequence
from typing import get_args

from pf_core.config.serving import Frequency
from pf_core.config.training import ModelConfig
from pf_core.experiments.claims import FEATURES, LONGER_RECIPES
from pf_core.experiments.families import (
    HIDDEN_DIMS,
    LAYERS,
    recipe_of_capacity,
    recipe_of_type,
    recipes_by_dim,
    recipes_by_heads,
    recipes_by_length,
)
from pf_core.experiments.quantities import ALL, MAX_TASK_CHARS
from pf_core.experiments.recipe import BASE, Set
from pf_core.experiments.tables import COVERAGE, ENTROPY, RECALL, Column, Row, Section
from pf_core.printable import printable


def paper_sections(base: ModelConfig, tasks: Sequence[str]) -> list[Section]:
    """Return the tables and figures for a site's base model and its positive action types (`tasks`)."""
    return [
        _model_comparison(),
        _batch_vs_realtime(),
        _objectives(),
        _negatives(),
        *([_multi_task(tasks)] if len(tasks) > 1 else []),
        _features(),
        _sequence_length(base),
        _embedding_dimension(base),
        _capacity(base),
        _sasrec_losses(),
        _masking(),
        _sequence_selection(),
        _heads(base),
        _training_budget(),
        _ours(),
    ]


def _both(recall: float, coverage: float) -> dict[Column, float]:
    return {RECALL: recall, COVERAGE: coverage}


PAPER_BASE = _both(0.229, 0.042)


def _model_comparison() -> Section:
    return Section(
        name="model-comparison",
        title="PinnerFormer against baselines",
        where="Table 1, section 4.2.1",
        columns=(RECALL, ENTROPY, COVERAGE),
        rows=(
            Row("Popularity, last week", "popularity_7d"),
            Row("Popularity, all days", "popularity_ever"),
            Row("Mean of 20 newest pins", "mean_of_20"),
            Row("Mean of 100 newest pins", "mean_of_100"),
            Row("PinnerSage (5 clusters)", "pinnersage_5", {**_both(0.026, 0.130), ENTROPY: 1.69}),
            Row("PinnerSage (20 clusters)", "pinnersage_20", {**_both(0.046, 0.133), ENTROPY: 2.10}),
            Row("PinnerFormer", BASE, {**PAPER_BASE, ENTROPY: 1.97}),
        ),
        drawing="relative",
        note="PinnerSage's recall is an oracle's: for each positive, the nearest of the user's clusters is the query. "
        "Its entropy and coverage are those of results blended in turn. Popularity and means are baselines of ours.",
    )


def _batch_vs_realtime() -> Section:
    numbers: dict[Frequency, tuple[dict[Column, float], dict[Column, float]]] = {
        "once": (_both(0.198, 0.048), PAPER_BASE),
        "daily": (_both(0.216, 0.052), _both(0.243, 0.043)),
        "realtime": (_both(0.251, 0.057), _both(0.264, 0.045)),
    }
    return Section(
        name="batch-vs-realtime",
        title="How often embeddings are inferred",
        where="Table 2, section 4.2.2",
        columns=(RECALL, COVERAGE),
        rows=tuple(
            row
            for frequency, (sasrec, ours) in numbers.items()
            for row in (
                Row(f"{frequency.capitalize()}: SASRec", "sasrec", sasrec, frequency),
                Row(f"{frequency.capitalize()}: PinnerFormer", BASE, ours, frequency),
            )
        ),
        drawing="frequencies",
        note="Once: embedded at the cut. Daily: embedded every day, with the one-day lag of offline logs. Realtime: "
        "embedded just before the positive; of a user's many, ten are drawn at random (the paper takes all).",
    )


def _objectives() -> Section:
    return Section(
        name="objectives",
        title="Training objectives",
        where="Table 3, section 4.2.3",
        columns=(RECALL, COVERAGE),
        rows=(
            Row("Next action", "next_action", _both(0.186, 0.050)),
            Row("SASRec (softmax)", "sasrec", _both(0.198, 0.048)),
            Row("All action (28 d)", "all_action", _both(0.224, 0.028)),
            Row("Dense all action (14 d)", "dense_all_action_14d", _both(0.223, 0.043)),
            Row("Dense all action (28 d)", BASE, PAPER_BASE),
            Row("Dense all action + SASRec", "summed_objectives"),
        ),
        drawing="relative",
        note="The paper tried sums of objectives, and gives no numbers for them.",
    )


def _negatives() -> Section:
    return Section(
        name="negatives",
        title="Negatives and sample probability correction",
        where="Table 4, section 4.2.4",
        columns=(RECALL, COVERAGE),
        rows=(
            Row("Random", "random_uncorrected", _both(0.136, 0.002)),
            Row("In-batch", "in_batch_uncorrected", _both(0.071, 0.163)),
            Row("Mixed", "mixed_uncorrected", _both(0.138, 0.083)),
            Row("Random, corrected", "random_corrected", _both(0.139, 0.001)),
            Row("In-batch, corrected", "in_batch_corrected", _both(0.167, 0.119)),
            Row("Mixed, corrected", BASE, PAPER_BASE),
        ),
        drawing="relative",
    )


PAPER_TASKS = {
    "only_closeup": {"closeup": 0.27, "click": 0.02, "repin": 0.09, ALL: 0.17},
    "only_click": {"closeup": 0.01, "click": 0.49, "repin": 0.01, ALL: 0.12},
    "only_repin": {"closeup": 0.15, "click": 0.03, "repin": 0.17, ALL: 0.13},
    BASE: {"closeup": 0.23, "click": 0.28, "repin": 0.13, ALL: 0.23},
}


def _multi_task(tasks: Sequence[str]) -> Section:
    shown = {task: printable(task, max_chars=MAX_TASK_CHARS).capitalize() for task in (*tasks, ALL)}
    columns = tuple(Column(label, "recall", task) for task, label in shown.items())
    models = {**{recipe_of_type(task): f"{shown[task]} only" for task in tasks}, BASE: "Multi-task"}
    return Section(
        name="multi-task",
        title="Learning several tasks at once",
        where="Table 5, section 4.2.5",
        columns=columns,
        rows=tuple(
            Row(
                label,
                recipe,
                {column: paper[column.task] for column in columns if column.task in paper}
                if (paper := PAPER_TASKS.get(recipe))
                else {},
            )
            for recipe, label in models.items()
        ),
        drawing="grid",
        note="Recall@10. Rows: what the model learned from. Columns: which positives it is judged by. The paper's "
        "closeups and clicks are those of more than 10 seconds.",
    )


def _features() -> Section:
    numbers = dict(
        zip(
            FEATURES,
            [(0.142, 0.0005), (0.210, 0.050), (0.224, 0.040), (0.226, 0.042), (0.226, 0.042), (0.228, 0.041)],
            strict=True,
        )
    )
    return Section(
        name="features",
        title="Leaving out one feature",
        where="Table 6, section 4.2.6",
        columns=(RECALL, COVERAGE),
        rows=(
            *(Row(f"Without {name}", recipe, _both(*numbers[recipe])) for recipe, name in FEATURES.items()),
            Row("All features", BASE, PAPER_BASE),
        ),
        drawing="relative",
        note="PinSage stands for the site's content vectors.",
    )


def _sequence_length(base: ModelConfig) -> Section:
    return Section(
        name="sequence-length",
        title="Sequence length",
        where="Figure, section 4.2.7",
        columns=(RECALL, COVERAGE),
        rows=tuple(Row(f"{size} actions", recipe, size=size) for size, recipe in recipes_by_length(base).items()),
        drawing="curves",
        note="The paper's figure is printed without numbers; at 256 actions it has a recall of 0.229 and a coverage of "
        "0.042.",
    )


def _embedding_dimension(base: ModelConfig) -> Section:
    return Section(
        name="embedding-dimension",
        title="Embedding dimension",
        where="Figure, appendix A.4.2",
        columns=(RECALL, ENTROPY, COVERAGE),
        rows=tuple(Row(f"{size} numbers", recipe, size=size) for size, recipe in recipes_by_dim(base).items()),
        drawing="curves",
        note="The paper's figure is printed without numbers; at 256 numbers it has a recall of 0.229.",
    )


PAPER_LAYERS, PAPER_HIDDEN_DIMS = (2, 4, 6), (256, 512, 768)

PAPER_CAPACITY = {
    (2, 256): _both(0.2189, 0.0359),
    (2, 512): _both(0.2241, 0.0388),
    (2, 768): _both(0.2246, 0.0397),
    (4, 256): _both(0.2236, 0.0366),
    (4, 512): _both(0.2240, 0.0412),
    (4, 768): _both(0.2272, 0.0426),
    (6, 256): _both(0.2233, 0.0383),
    (6, 512): _both(0.2264, 0.0400),
    (6, 768): _both(0.2293, 0.0417),
}


def _capacity(base: ModelConfig) -> Section:
    return Section(
        name="capacity",
        title="Model capacity",
        where="Table 9, appendix A.4.3",
        columns=(RECALL, COVERAGE),
        rows=tuple(
            Row(
                f"{layers} × {hidden} (paper: {paper_layers} × {paper_hidden})",
                recipe_of_capacity(base, layers, hidden),
                PAPER_CAPACITY[paper_layers, paper_hidden],
                size=hidden,
            )
            for layers, paper_layers in zip(LAYERS, PAPER_LAYERS, strict=True)
            for hidden, paper_hidden in zip(HIDDEN_DIMS, PAPER_HIDDEN_DIMS, strict=True)
        ),
        drawing="capacity",
        note="Layers × hidden dimension. Ours are smaller: each stands for the paper's at its place of the range.",
    )


def _sasrec_losses() -> Section:
    return Section(
        name="sasrec-losses",
        title="Losses for SASRec",
        where="Table 10, appendix A.4.4",
        columns=(RECALL, COVERAGE),
        rows=(
            Row("Binary cross-entropy", "sasrec_bce", _both(0.138, 0.111)),
            Row("Sampled softmax", "sasrec_unweighted", _both(0.181, 0.056)),
            Row("Sampled softmax, equal e₁ weight", "sasrec", _both(0.198, 0.048)),
            Row("PinnerFormer", BASE, PAPER_BASE),
        ),
        drawing="relative",
    )


def _masking() -> Section:
    return _pair("masking", "Causal masking", "section 3.4.3", Row("No mask", "no_causal_mask"))


def _sequence_selection() -> Section:
    row = Row("Strong actions only", "strong_actions_only")
    return _pair("sequence-selection", "Which actions a sequence holds", "appendix A.4.1", row)


def _heads(base: ModelConfig) -> Section:
    rows = [Row(f"{heads} heads", recipe) for heads, recipe in recipes_by_heads(base).items() if recipe != BASE]
    return _pair("heads", "Attention heads", "appendix A.4.3", *rows, base=f"{base.num_heads} heads (PinnerFormer)")


def _pair(name: Set, title: str, where: str, *rows: Row, base: str = "PinnerFormer") -> Section:
    return Section(
        name=name,
        title=title,
        where=where,
        columns=(RECALL, COVERAGE),
        rows=(*rows, Row(base, BASE, PAPER_BASE)),
        drawing="relative",
        note="The paper says it in words, without numbers.",
    )


def _training_budget() -> Section:
    names = ("SASRec", "PinnerFormer")
    frequencies: tuple[Frequency, ...] = get_args(Frequency)
    return Section(
        name="training-budget",
        title="Beyond the paper: the order after longer training",
        where="ours",
        columns=(RECALL, COVERAGE),
        rows=(
            Row("As everywhere else, once: PinnerFormer", BASE),
            *(
                Row(f"{frequency.capitalize()}: {name}", recipe, frequency=frequency)
                for frequency in frequencies
                for name, recipe in zip(names, LONGER_RECIPES, strict=True)
            ),
        ),
        drawing="relative",
        note="2.5 times the steps of the trainings in all other tables.",
    )


def _ours() -> Section:
    return Section(
        name="ours",
        title="Beyond the paper: log Q, the start, relative times",
        where="ours",
        columns=(RECALL, ENTROPY, COVERAGE),
        rows=(
            Row("log Q for the negatives alone", "log_q_negatives"),
            Row("Default start of the weights", "default_init"),
            Row("Without since-latest and gap", "no_relative_time"),
            Row("PinnerFormer", BASE, {**PAPER_BASE, ENTROPY: 1.97}),
        ),
        drawing="relative",
    )
