"""Checks of the training set and of a trained model, free of any orchestrator."""

from pathlib import Path

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.hashing import is_held_out
from pf_core.logs.training_users import read_training_users
from pf_core.training.plan import current_model, models_dir, read_history, training_fault
from pf_core.training.training_set import latest_training_set, open_training_set


def judge_held_out_users(site: Site, training_set: Path) -> CheckResult:
    """Every user is in the split that the hash of the user id decides, so that no user is in both; and every training
    user is one whom the site file's `training.users` selects."""
    data = open_training_set(training_set)
    share, train, held_out = data.manifest["held_out_share"], data.train.user_ids(), data.held_out.user_ids()
    num_wrong = int(is_held_out(train, share).sum()), int((~is_held_out(held_out, share)).sum())
    reason = (
        f"{num_wrong[0]:,} of {len(train):,} training users should be held out, "
        f"{num_wrong[1]:,} of {len(held_out):,} held-out users should not"
    )
    num_not_selected = 0
    if "users" in data.manifest or site.training.users is not None:
        users = read_training_users(site, as_of=data.manifest["cut_ds"])
        num_not_selected = int((~users.are_selected(train)).sum())
        reason += f", training.users does not select {num_not_selected:,} training users"
    return CheckResult(data.manifest["cut_ds"], num_wrong == (0, 0) and not num_not_selected, reason)


def judge_cut(site: Site) -> CheckResult:
    """No action of the training set, of either split, is later than the day of the cut."""
    data = open_training_set(latest_training_set(site))
    num_later = sum(int((split.ts >= data.cut_us).sum()) for split in (data.train, data.held_out))
    cut_ds = data.manifest["cut_ds"]
    return CheckResult(cut_ds, num_later == 0, f"{num_later:,} actions after {cut_ds}")


def judge_loss(site: Site) -> CheckResult:
    """The loss of the current model is finite and fell."""
    manifest = current_model(site)
    if manifest is None:
        return CheckResult(site.start_ds, False, "there is no model")
    model_version = manifest["model_version"]
    fault = training_fault(read_history(models_dir(site) / model_version))
    return CheckResult(manifest["cut_ds"], fault is None, f"model {model_version}: {fault or 'no fault found'}")
