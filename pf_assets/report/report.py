"""The report on the paper: every table and figure beside our numbers, and a verdict for each of its claims.

`build_report` turns results into text and pictures; `render_html` makes one self-contained page of them,
`render_markdown` a text with its figures in a folder. No verdict and no number is written by hand. Explanations of
claims that do not hold are, and they are kept in a file of their own, by the claim's id. Any subset of the recipes
makes a report; recipes that are missing are marked as not run.
"""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pf_assets.report.figures import Point, plot_cost, plot_density, plot_section, plot_staleness
from pf_assets.report.markdown import to_markdown
from pf_assets.report.views import MARKS, Picture, Report, SectionView, view_claim, view_table
from pf_core.config.training import ModelConfig, TrainConfig, demo
from pf_core.experiments.bootstrap import MARGIN, NUM_DRAWS, ClaimVerdict, Interval, Resampled, assess_claim
from pf_core.experiments.claims import LONGER_RECIPES, Results
from pf_core.experiments.families import HIDDEN_DIMS, LAYERS, recipe_of_capacity, recipes_by_length
from pf_core.experiments.paper_claims import all_claims
from pf_core.experiments.paper_tables import paper_sections
from pf_core.experiments.quantities import Metric
from pf_core.experiments.recipe import BASE
from pf_core.experiments.tables import Section
from pf_core.model.flops import flops_per_user

DPI = 120

PAGE = "page.html.j2"
"""The template of the page, in this folder: loops and conditions, no other logic."""


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """Training and cost of a recipe: of several seeds, the mean duration, and the rest from the first."""

    seconds: float | None = None
    num_parameters: int | None = None
    config: Mapping[str, Any] | None = None
    """The TrainConfig as JSON; None if nothing is trained."""
    mlflow_url: str | None = None
    by_density: Mapping[int, Interval] = field(default_factory=dict)
    """Recall by the number of pins in the index."""


@dataclass(frozen=True)
class NoisyFacts:
    """Results of the base with noisy content vectors, and of baselines with the same vectors."""

    recipe: str
    facts: RecipeFacts
    recalls: Mapping[str, Mapping[str, Mapping[int, Interval]]]
    """Recall by kind of positives, by embedder, and by the number of pins in the index."""


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    origin: str = ""
    """Sentences that name the commit and the training code of the models."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Facts about training and evaluation in the order in which they are shown: site, cut, users, pins, steps."""
    recipes: Mapping[str, RecipeFacts] = field(default_factory=dict)
    noisy: Mapping[float, NoisyFacts] = field(default_factory=dict)
    """Results by the noise of the content vectors, as a multiple of their norm."""
    explanations: Mapping[str, str] = field(default_factory=dict)
    """Why claims do not hold on this site, by claim id."""
    feature_dim: int | None = None
    """Dimension of a content vector, which the cost of an embedding depends on."""
    left_out: Sequence[str] = ()
    """One sentence for each stored run that was not used."""


def build_report(results: Results, facts: ReportFacts) -> Report:
    """Assess all claims and make all tables and figures."""
    base, resampled = _base_model(facts), Resampled(results)
    verdicts = [assess_claim(claim, resampled) for claim in all_claims(base, results.tasks)]
    sections = [_view_section(section, resampled, verdicts, facts) for section in paper_sections(base, results.tasks)]
    staleness, cost = _staleness(resampled), _cost(base, resampled, facts)
    counts = Counter(each.verdict for each in verdicts if not each.claim.is_ours)
    return Report(
        origin=facts.origin,
        counts={verdict: counts[verdict] for verdict in MARKS},
        num_claims=sum(counts.values()),
        facts=[(name, _plain(value)) for name, value in facts.facts.items()],
        rule=_rule(resampled),
        sections=[*sections, staleness, cost],
        runs=[
            *(
                _run(name, len(seeds), facts.recipes.get(name, RecipeFacts()))
                for name, seeds in results.outcomes.items()
            ),
            *(_run(noisy.recipe, 1, noisy.facts) for noisy in facts.noisy.values()),
        ],
        left_out=list(facts.left_out),
    )


def render_html(report: Report) -> str:
    """Return the report as one HTML page that needs no network."""
    environment = Environment(
        loader=PackageLoader("pf_assets", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(PAGE).render(report=report, marks=MARKS)


def render_markdown(report: Report, figure_dir: Path) -> str:
    """Write the figures to `figure_dir`, and return the text, which belongs into the parent of that folder."""
    figure_dir.mkdir(parents=True, exist_ok=True)
    for section in report.sections:
        for picture in section.pictures:
            (figure_dir / f"{picture.name}.png").write_bytes(picture.png)
    return to_markdown(report, figures=figure_dir.name)


def _base_model(facts: ReportFacts) -> ModelConfig:
    trained = facts.recipes.get(BASE)
    if trained is None or trained.config is None:
        return demo().model
    return TrainConfig.model_validate(trained.config).model


def _view_section(
    section: Section, resampled: Resampled, verdicts: Sequence[ClaimVerdict], facts: ReportFacts
) -> SectionView:
    figure = plot_section(section, resampled)
    pictures = [] if figure is None else [Picture(section.name, section.title, "", _png(figure))]
    if section.name == "model-comparison":
        pictures += _density(facts)
    return SectionView(
        name=section.name,
        title=section.title,
        where=section.where,
        note=section.note,
        table=view_table(section, resampled),
        pictures=pictures,
        claims=[view_claim(each, facts.explanations) for each in verdicts if each.claim.section == section.name],
    )


def _density(facts: ReportFacts) -> list[Picture]:
    pictures = []
    curves = {name: known.by_density for name, known in facts.recipes.items() if known.by_density}
    if curves:
        text = "Recall@10 by the number of pins in the index, drawn at random from the same candidates."
        figure = plot_density({"": {"": curves}})
        pictures.append(Picture("index-density", "The order by density of the index", text, _png(figure)))
    if facts.noisy:
        text = (
            "The same with noise added to the content vectors, as a multiple of their norm, in training and in "
            "evaluation. Above: all positives. Below: discovery, without the pins that the user had acted on, because "
            "one of PinnerSage's own pins finds itself again, however noisy the vectors are."
        )
        panels: dict[str, dict[str, Mapping[str, Mapping[int, Interval]]]] = {}
        for noise, known in facts.noisy.items():
            for kind, curves_of in known.recalls.items():
                panels.setdefault(kind, {})[f"noise {noise:g} ×"] = curves_of
        pictures.append(Picture("content-noise", "The order by content noise", text, _png(plot_density(panels))))
    return pictures


def _staleness(resampled: Resampled) -> SectionView:
    frequencies = {name: seeds[0].frequencies for name, seeds in resampled.results.outcomes.items() if seeds}
    names = [
        name
        for name, known in frequencies.items()
        if "once" in known and "realtime" in known and name not in LONGER_RECIPES
    ]
    pictures = []
    if names:
        figure = plot_staleness({name: resampled.staleness(name) for name in names})
        pictures = [Picture("staleness", "Staleness", "", _png(figure))]
    return SectionView(
        name="staleness",
        title="How embeddings go stale",
        where="ours",
        note="Recall@10 of the embedding made once, at the cut, on the positives of each day after it, as a share of "
        "what embeddings made just before them reach (on at most ten of a user, drawn at random). Bands: 95 % over "
        "users.",
        table=None,
        pictures=pictures,
        claims=[],
    )


def _cost(base: ModelConfig, resampled: Resampled, facts: ReportFacts) -> SectionView:
    families = {
        "capacity": {
            f"{layers}×{hidden}": recipe_of_capacity(base, layers, hidden)
            for layers in LAYERS
            for hidden in HIDDEN_DIMS
        },
        "sequence length": {f"{length} actions": recipe for length, recipe in recipes_by_length(base).items()},
    }
    points = [
        Point(
            family,
            label,
            flops_per_user(TrainConfig.model_validate(trained.config).model, feature_dim=facts.feature_dim) / 1e6,
            resampled.interval_of(Metric("recall", recipe)),
        )
        for family, recipes in families.items()
        for label, recipe in recipes.items()
        if facts.feature_dim is not None
        and (trained := facts.recipes.get(recipe)) is not None
        and trained.config is not None
        and resampled.has(Metric("recall", recipe))
    ]
    return SectionView(
        name="inference-cost",
        title="Quality against the cost of inference",
        where="ours",
        note="Multiplications and additions for one user embedding, with S actions of I numbers, hidden dimension H, L "
        "layers and D numbers of the embedding: 2·S·I·H + (L − 1)·(24·S·H² + 4·S²·H) + 4·S·H² + 20·H² + 4·S·H + 8·H² + "
        "8·H·D. Of the last layer only the newest position is computed. Points are labelled by layers × hidden "
        "dimension and by sequence length; the embedding's dimension costs next to nothing.",
        table=None,
        pictures=[Picture("inference-cost", "Quality against cost", "", _png(plot_cost(points)))] if points else [],
        claims=[],
    )


def _rule(resampled: Resampled) -> list[str]:
    spreads = {name: resampled.seed_spread(Metric(name, BASE)) for name in ("recall", "coverage", "entropy")}
    known = ", ".join(f"{name} {100 * value:.1f} %" for name, value in spreads.items() if not math.isnan(value))
    return [
        f"Users are drawn with replacement {NUM_DRAWS} times, the same users for every recipe; a user counts with the "
        "mean over the recipe's seeds. For P90 coverage, which counts distinct pins, every draw leaves out a fifth of "
        "the users instead, and deviations are doubled accordingly.",
        "Every draw also moves each trained recipe by the noise of its seeds, pooled over all recipes with two seeds "
        f"or more, divided by the root of its number of seeds. Standard deviation from seed to seed: {known}."
        if known
        else "No recipe has two seeds: the noise of training is not known, and intervals are those of users alone.",
        "What 95 % of the draws lie between is the interval. “> 0” is reproduced if the interval is above 0, and "
        f"contradicted if it is below. For “alike” and “no better” the margin is {100 * MARGIN:g} % of the reference: "
        "reproduced if the interval is inside, contradicted if it is outside. Anything else is not distinguishable.",
        "A claim of several statistics is reproduced if all of them are, and contradicted if one of them is.",
    ]


def _run(name: str, num_seeds: int, known: RecipeFacts) -> tuple[str, str, str, str, str]:
    minutes = "" if known.seconds is None else f"{known.seconds / 60:.1f}"
    return name, str(num_seeds), minutes, _plain(known.num_parameters), known.mlflow_url or ""


def _plain(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()
