"""`pf promote`: a person chooses the model that embeds users, undoes the choice, or lists the models."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from pf_assets.cli.output import show, show_json
from pf_assets.settings import current_site
from pf_assets.tracking.tracking import DECISION_TAG, VERDICT_TAG, Promotion, RegisteredModel, Tracking
from pf_core.errors import PipelineError, materialize_command


def promote(
    version: Annotated[int | None, typer.Argument(help="registry version to promote")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="return to the previous champion")] = False,
    because: Annotated[str | None, typer.Option(help="reason, stored with the model")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="list the models as JSON")] = False,
) -> None:
    """Make a registered model the champion, or undo the last promotion; without arguments, list the models."""
    tracking = Tracking(current_site())
    if version is not None and undo:
        raise PipelineError("a version and --undo are given", "give one of them")
    if as_json and (undo or version is not None):
        raise PipelineError("--json lists the models, and promotes none", "pf promote --json")
    if undo:
        _announce(tracking, tracking.undo_promotion(because=because))
    elif version is not None:
        if not because:
            raise PipelineError(
                "a promotion needs a reason, which is stored with the model", f'pf promote {version} --because "..."'
            )
        tracking.promote(version, because=because)
        champion = tracking.champion()
        assert champion is not None
        _announce(tracking, champion)
    elif as_json:
        show_json(models_json(tracking))
    else:
        _list(tracking)


def _announce(tracking: Tracking, champion: RegisteredModel) -> None:
    refit = tracking.refit_of(champion)
    serves = "it" if refit is None else f"its refit, version {refit.version}, model {refit.served_version}"
    show(
        f"the champion is version {champion.version}, model {champion.served_version}. The next new day of "
        f"user_embeddings embeds all users with {serves}; until that day is released, the current release stays"
    )


def models_json(tracking: Tracking) -> dict[str, Any]:
    """Return the models and the history of champions, newest first; without a model both are empty."""
    champion, candidate = tracking.champion(), tracking.candidate()
    models = [
        {
            "version": model.version,
            "model": model.served_version,
            "is_champion": model == champion,
            "is_candidate": model == candidate,
            "judged_version": model.judged_version,
            "tags": dict(model.tags),
        }
        for model in tracking.versions()
    ]
    return {"models": models, "champions": [asdict(promotion) for promotion in reversed(tracking.promotions())]}


def _list(tracking: Tracking) -> None:
    models = tracking.versions()
    if not models:
        raise PipelineError(
            "no model is registered yet", f"train one with: {materialize_command('training_set,pinnerformer_model')}"
        )
    champion, candidate = tracking.champion(), tracking.candidate()
    for model in models:
        if model.judged_version is not None:
            until = f"refit of version {model.judged_version}, until {model.tags['cut_ds']}"
            show(f"version {model.version:<4} {model.served_version:<18} {until}")
            continue
        aliases = [alias for alias, one in (("champion", champion), ("candidate", candidate)) if one == model]
        recall, discovery, coverage = (
            model.tags.get(f"evaluation_{name}", "-")
            for name in ("recall_at_10", "discovery_at_10", "p90_coverage_at_10")
        )
        show(
            f"version {model.version:<4} {model.served_version:<18} {', '.join(aliases):<20} "
            f"recall@10 {recall:<7} discovery@10 {discovery:<7} P90 coverage@10 {coverage}".rstrip(),
            bold=bool(aliases),
        )
        if DECISION_TAG in model.tags:
            show(f"  {model.tags[DECISION_TAG]}")
        if VERDICT_TAG in model.tags:
            show(f"  {VERDICT_TAG} {model.tags[VERDICT_TAG].partition(':')[0]}")
    show("champions, newest first", bold=True)
    for promotion in reversed(tracking.promotions()):
        show(f"  {_line(promotion)}")


def _line(promotion: Promotion) -> str:
    line = f"{promotion.promoted_at or 'at an unknown time':<25} version {promotion.version}: {promotion.because}"
    if promotion.undone_at is None:
        return line
    because = f": {promotion.undone_because}" if promotion.undone_because else ""
    return f"{line} (undone {promotion.undone_at}{because})"
