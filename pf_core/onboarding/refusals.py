"""What a run would fail on after its logs are read: the pins and the training; and what makes a training senseless."""

from typing import cast

from pf_core.config.site import Site
from pf_core.config.training import choose
from pf_core.errors import PipelineError
from pf_core.onboarding.forecast import KnownPins, foresee_training, too_few
from pf_core.onboarding.questions import counted
from pf_core.onboarding.survey import Survey
from pf_core.pins.catalogue import nothing_usable
from pf_core.training.auto import FACTOR_DIMS
from pf_core.training.training_set import TrainingSetManifest, refuse_without_content

MIN_FACTOR_DIM = 8
"""Factors of fewer dimensions tell hardly any pins or users apart: a warning."""


def refuse_unusable_pins(site: Site, survey: Survey, known: KnownPins | str | None) -> None:
    """Refuse files of pins of which no row can be used, or which name no candidate."""
    if not isinstance(known, KnownPins):
        return
    if not known.num and known.rejects:
        raise nothing_usable(site.start_ds, known.rejects)
    if not known.num_candidates and not site.source.pins.is_incremental:  # later days may name some
        num_pins = known.num + survey.actions.num_pins - known.num_in_log
        raise PipelineError(
            f"none of the {num_pins:,} pins is a candidate: no row of the catalogue has a true "
            f"`{site.source.pins.is_candidate}`",
            "fix source.pins.is_candidate in the site file",
        )


def refuse_training(site: Site, survey: Survey, known: KnownPins | str | None) -> None:
    """Refuse a log that is too small to train on, and a preset that reads content vectors where no pin has any."""
    preset = site.training.preset
    if preset != "auto":
        if site.source.pins.vectors is None:
            manifest = cast("TrainingSetManifest", {"feature_dim": 0})
            refuse_without_content(manifest, choose(preset, site.training.changes), preset)
        return
    if (problem := too_few(survey, foresee_training(site, survey, known))) is not None:
        raise problem


def warn_of_few(site: Site, survey: Survey, known: KnownPins | str | None) -> list[str]:
    """Return a sentence if preset auto could be trained, but has too few pins or users to learn a factor for each."""
    found = foresee_training(site, survey, known) if site.training.preset == "auto" else None
    if found is None or not found.is_enough or not survey.plan.is_whole:
        return []
    least, dim = min(FACTOR_DIMS), min(found.num_pins, found.num_users) // 4  # the limit in training/auto.py
    if dim >= MIN_FACTOR_DIM:
        return []
    return [
        f"the log has too little to learn from: {counted(found.num_pins, 'pin')} and "
        f"{counted(found.num_users, 'training user')}; a model is trained all the same, with a factor dim of {dim} "
        f"instead of {least} or more, which needs {4 * least} of each; check the columns of users and pins, or add more"
    ]
