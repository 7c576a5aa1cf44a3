"""RecTools' SASRec, trained on the training users' timelines; a test user's own newest actions are the input.

Timelines longer than `session_max_len` are divided into segments, so that every action is learned from. The loss is a
softmax over `n_negatives` random pins, as the full one needs batch x sequence x pins of memory. Training ends after
`epochs` or when the time is over, whichever is first. Test users with no pin that the model knows get no list.
"""

import logging
import time
import warnings
from typing import Any

import numpy as np
import pandas as pd
from exchange import Actions, Lists, Task, main
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from sequences import segment_ids

SEED = 0
RESERVE = 0.3
"""Share of the time that is kept for ranking."""
USERS_A_BATCH = 256


class StopInTime(Callback):  # type: ignore[misc]  # Lightning is not in our environment
    """Ends training at a Unix time; Lightning's max_time starts to count only after RecTools has made its sequences."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if time.time() > self.ends_at:
            trainer.should_stop = True


def dataset(users: np.ndarray, actions: Actions) -> Dataset:
    """RecTools sorts by time and keeps the order of equal times: days are enough."""
    return Dataset.construct(
        pd.DataFrame(
            {
                Columns.User: users,
                Columns.Item: actions.pin,
                Columns.Weight: 1.0,
                Columns.Datetime: pd.Timestamp("2000-01-01") + pd.to_timedelta(actions.day, unit="D"),
            }
        )
    )


def rank(task: Task) -> tuple[Lists, str]:
    log, settings = task.log, task.settings
    warnings.simplefilter("ignore")  # that the loader has few workers, that nothing is logged
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed_everything(SEED)
    train, past = log.train.chosen(settings["actions"]), log.past.chosen(settings["actions"])
    options: dict[str, Any] = {name: settings[name] for name in ("n_blocks", "n_heads", "n_factors", "session_max_len")}
    model = SASRecModel(
        **options,
        dropout_rate=settings["dropout"],
        lr=settings["lr"],
        batch_size=settings["batch_size"],
        loss="sampled_softmax",
        n_negatives=settings["n_negatives"],
        epochs=settings["epochs"],
    )
    model._trainer = Trainer(  # RecTools' own way to change the trainer, see its documentation
        accelerator="cpu",
        devices=1,
        max_epochs=settings["epochs"],
        callbacks=[StopInTime(time.time() + task.seconds_left() - RESERVE * task.budget_s)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model.fit(dataset(segment_ids(train, settings["session_max_len"] + 1), train))

    lists, lengths = Lists(), log.list_lengths()
    known_pins = np.intersect1d(train.pin, model.data_preparator.get_known_item_ids())
    users = np.unique(past.user[np.isin(past.pin, known_pins)])
    asked = dataset(past.user, past)
    # Users with lists of like length are asked together: RecTools takes one length for all.
    by_length = users[np.argsort(lengths[users], kind="stable")]
    answers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for start in range(0, len(by_length), USERS_A_BATCH):
        batch = by_length[start : start + USERS_A_BATCH]
        num_pins = min(int(lengths[batch].max()), len(known_pins))
        found = model.recommend(batch, asked, k=num_pins, filter_viewed=False)
        for user, rows in found.groupby(Columns.User):
            answers[int(user)] = rows[Columns.Item].to_numpy(), rows[Columns.Score].to_numpy()
    for user in sorted(answers):
        lists.add(user, *answers[user], lengths[user])
    assert model.fit_trainer is not None
    done = model.fit_trainer.current_epoch
    return lists, f"trained {done} of {settings['epochs']} epochs" if done < settings["epochs"] else ""


if __name__ == "__main__":
    main(rank, ("rectools", "torch", "pytorch-lightning"))
