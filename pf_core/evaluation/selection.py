"""How good a model is for the users whom `training.users` selects, and for the others, whom nobody may learn from.

Both are held out, so that the model has seen neither. A difference says whether what the selected users taught holds
for the others, too; it decides nothing.
"""

import numpy as np

from pf_core.config.site import Site
from pf_core.evaluation.manifest import SelectionSummary
from pf_core.evaluation.scores import Scores
from pf_core.logs.training_users import read_training_users
from pf_core.metrics.bootstrap import bootstrap_interval, mean


def by_selection(site: Site, scores: Scores, *, as_of: str | None = None) -> dict[str, SelectionSummary] | None:
    """Return recall of the users selected as of the cut and of the others; None if the site file has no
    `training.users`."""
    if site.training.users is None:
        return None
    is_selected = read_training_users(site, as_of=as_of).are_selected(scores.user_ids)
    return {"selected": _summary(scores, is_selected), "others": _summary(scores, ~is_selected)}


def describe_selection(by_group: dict[str, SelectionSummary]) -> str:
    """Return recall of both groups as a sentence."""
    parts = [
        f"{each['recall_at_10']:.4f} for {each['users']:,} users who {who} (95 %: "
        f"{each['recall_at_10_interval'][0]:.4f} to {each['recall_at_10_interval'][1]:.4f})"
        for each, who in ((by_group["selected"], "are selected"), (by_group["others"], "are not"))
        if each["users"]
    ]
    return f"training.users: recall@10 {', '.join(parts)}"


def _summary(scores: Scores, of_group: np.ndarray) -> SelectionSummary:
    once = scores.frequencies["once"]
    recall, discovery = once.recall_at_10[of_group], once.discovery_at_10[of_group]
    return {
        "users": int(of_group.sum()),
        "recall_at_10": mean(recall),
        "recall_at_10_interval": list(bootstrap_interval(recall)),
        "discovery_at_10": mean(discovery),
        "discovery_at_10_interval": list(bootstrap_interval(discovery)),
    }
