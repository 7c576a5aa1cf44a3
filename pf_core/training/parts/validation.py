"""What the weights are worth to the validation users, who choose the number of steps."""

import torch
from torch import Tensor

from pf_core.model.parts.memory import SERVED_SHIFT
from pf_core.model.parts.model import PartsModel
from pf_core.training.parts.likelihoods import log_likelihoods, with_memory, without_own
from pf_core.training.parts.rows import DayRows

USERS_AT_ONCE = 128


@torch.no_grad()
def validate(model: PartsModel, rows: DayRows) -> dict[str, float]:
    """Return the loss, and recall@10 as served, of the vector alone, and of pins that are new to the user."""
    users = model.embed_users(rows.own, rows.own_inputs, rows.newest)
    pool_MV = model.embed_pins(rows.pool_inputs, rows.rates_MW, rows.mean_rate_W)
    totals = {"validation_loss": 0.0, "recall_at_10": 0.0, "vector_recall_at_10": 0.0, "discovery_at_10": 0.0}
    num_new = 0
    for first in range(0, rows.own.num_users, USERS_AT_ONCE):
        part = _rows_between(rows, first, min(first + USERS_AT_ONCE, rows.own.num_users))
        chosen_P = (rows.own.row_P >= first) & (rows.own.row_P < first + part.own.num_users)
        vector_BM = users.vector_BV[first : first + part.own.num_users] @ pool_MV.T
        new_BM, is_new_T = without_own(vector_BM, part)
        if model.memory is None:
            vector_BM = likely_BM = served_BM = new_BM
        else:
            strength_P = users.strength_P[chosen_P]
            likely_BM = with_memory(vector_BM, part, strength_P)
            served_BM = with_memory(vector_BM, part, strength_P + SERVED_SHIFT)
        totals["validation_loss"] -= float((log_likelihoods(likely_BM, part) * part.weight_T).sum())
        for name, logits_BM in (("recall_at_10", served_BM), ("vector_recall_at_10", vector_BM)):
            totals[name] += float((_is_found(logits_BM, part, 10) * part.weight_T).sum())
        is_found_T = is_new_T & _is_found(new_BM, part, 10)
        num_new_B = torch.bincount(part.target_row_T[is_new_T], minlength=part.own.num_users)
        found_B = torch.bincount(part.target_row_T[is_found_T], minlength=part.own.num_users)
        totals["discovery_at_10"] += float((found_B / num_new_B.clamp(min=1)).sum())
        num_new += int((num_new_B > 0).sum())
    num_users = max(1, rows.own.num_users)
    sizes = {name: max(1, num_new) if name == "discovery_at_10" else num_users for name in totals}
    return {name: value / sizes[name] for name, value in totals.items()}


def _is_found(logits_BM: Tensor, rows: DayRows, k: int) -> Tensor:
    """Return which targets fewer than k pins are ranked before; ties count against a target."""
    if logits_BM.shape[1] <= k:
        return torch.ones_like(rows.target_row_T, dtype=torch.bool)
    limit_B = logits_BM.topk(k + 1, dim=1).values[:, k]
    return logits_BM[rows.target_row_T, rows.target_place_T] > limit_B[rows.target_row_T]


def _rows_between(rows: DayRows, first: int, last: int) -> DayRows:
    """Return some of the rows, with all pins."""
    own_P = (rows.own.row_P >= first) & (rows.own.row_P < last)
    target_T = (rows.target_row_T >= first) & (rows.target_row_T < last)
    own = rows.own
    return rows._replace(
        own=own._replace(
            num_users=last - first,
            row_P=own.row_P[own_P] - first,
            pin_P=own.pin_P[own_P],
            features_PX=own.features_PX[own_P],
            action_type_P=own.action_type_P[own_P],
        ),
        own_place_P=rows.own_place_P[own_P],
        target_row_T=rows.target_row_T[target_T] - first,
        target_place_T=rows.target_place_T[target_T],
        weight_T=rows.weight_T[target_T],
    )
