"""What models cannot see: actions and positives of held-out users on pins without a vector.

For the towers, these are the pins without a content vector. A model of parts has a vector for every pin that is known
at the cut, so only unknown pins are left; the same holds for a site without content vectors.
"""

import math

import numpy as np

from pf_core.config.site import Site
from pf_core.config.source import ColumnVectors
from pf_core.evaluation.manifest import VectorCoverage
from pf_core.evaluation.question import Question
from pf_core.training.training_set import TrainingSet

ACTIONS_AT_ONCE = 1 << 22
"""Actions of the held-out users that are read at a time."""


def vector_coverage(site: Site, question: Question, *, needs_content: bool = True) -> VectorCoverage:
    """Return the shares of actions before the cut and of positives after it on pins without a vector.

    `needs_content` is whether the model has vectors for pins with a content vector only, as the towers do.
    """
    return VectorCoverage(
        share_of_actions=_share_of_actions(question.data, needs_content=needs_content),
        share_of_positives=question.share_without_vector if needs_content else question.share_unaskable,
        remedy=_remedy(site, needs_content=needs_content),
    )


def _share_of_actions(data: TrainingSet, *, needs_content: bool) -> float:
    """Return the share of all actions of held-out users; NaN if the training set of an older version has no count."""
    counts = data.manifest["counts"]
    if "held_out_no_feature" not in counts:
        return math.nan
    without, dropped = counts["held_out_no_feature"], counts["dropped"]
    num_actions = without + dropped["unknown_action_type"] + dropped["unknown_surface"] + counts["held_out"]["actions"]
    if needs_content and data.is_content_known and not data.all_have_feature:
        pin = data.held_out.pin
        for first in range(0, len(pin), ACTIONS_AT_ONCE):
            without += int(np.count_nonzero(~data.has_feature[pin[first : first + ACTIONS_AT_ONCE]]))
    return without / max(1, num_actions)


def _remedy(site: Site, *, needs_content: bool) -> str:
    vectors, catalogue = site.source.pins.vectors if needs_content else None, site.source.pins.catalogue
    if isinstance(vectors, ColumnVectors):
        assert catalogue is not None, "a vector column is read from the catalogue"
        return f"source.pins.catalogue: {catalogue.path} has no row with `{vectors.column}` for these pins at the cut"
    if vectors is not None:
        return f"source.pins.vectors: {vectors.npy} and {vectors.ids} have no row for these pins"
    if catalogue is not None:
        return f"source.pins.catalogue: {catalogue.path} has no row for these pins at the cut, and neither has the log"
    return "source.pins.catalogue: a catalogue would make pins known before their first action"
