"""What nothing that is evaluated can see: actions and positives of held-out users on pins without a vector."""

import math

from pf_core.config.site import Site
from pf_core.config.source import ColumnVectors, LearnedVectors
from pf_core.evaluation.manifest import VectorCoverage
from pf_core.evaluation.question import Question
from pf_core.training.training_set import TrainingSetCounts


def vector_coverage(site: Site, question: Question) -> VectorCoverage:
    """Return the shares of actions before the cut and of positives after it on pins without a vector."""
    return VectorCoverage(
        share_of_actions=_share_of_actions(question.data.manifest["counts"]),
        share_of_positives=question.share_unaskable,
        remedy=_remedy(site),
    )


def _share_of_actions(counts: TrainingSetCounts) -> float:
    """Return the share of all actions of held-out users; NaN if the training set of an older version has no count."""
    if "held_out_no_feature" not in counts:
        return math.nan
    without, dropped = counts["held_out_no_feature"], counts["dropped"]
    num_actions = without + dropped["unknown_action_type"] + dropped["unknown_surface"] + counts["held_out"]["actions"]
    return without / max(1, num_actions)


def _remedy(site: Site) -> str:
    vectors, catalogue = site.source.pins.vectors, site.source.pins.catalogue
    if isinstance(vectors, LearnedVectors):
        return (
            f"source.pins.vectors in the site file: a later `until` (now {vectors.until}), a lower `min_count` (now "
            f"{vectors.min_count}) or a larger `max_pins` (now {vectors.max_pins:,}) gives more pins a vector"
        )
    if isinstance(vectors, ColumnVectors):
        assert catalogue is not None, "a vector column is read from the catalogue"
        return f"source.pins.catalogue: {catalogue.path} has no row with `{vectors.column}` for these pins at the cut"
    return f"source.pins.vectors: {vectors.npy} and {vectors.ids} have no row for these pins"
