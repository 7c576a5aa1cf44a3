"""The steps of a run in order, planned ahead by processes of their own."""

from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from pf_core.config.training import TrainConfig
from pf_core.parent_process import end_with_parent
from pf_core.training.parts.prepared import open_prepared
from pf_core.training.parts.rows import RowSampler, Step
from pf_core.training.training_set import open_training_set


class _Steps(Dataset[Step]):
    """The steps of a run by number; each process opens the files itself."""

    def __init__(self, training_set: Path, config: TrainConfig, prepared: Path, rank: int, world_size: int) -> None:
        self._arguments = training_set, config, prepared, rank, world_size
        self._sampler: RowSampler | None = None

    def __getitem__(self, step: int) -> Step:
        if self._sampler is None:
            path, config, prepared, rank, world_size = self._arguments
            data = open_training_set(path)
            self._sampler = RowSampler(data, config, open_prepared(data, prepared), rank, world_size)
        return self._sampler.plan(step)


def open_steps(
    training_set: Path,
    config: TrainConfig,
    prepared: Path,
    *,
    first_step: int,
    rank: int,
    world_size: int,
    num_workers: int,
) -> Iterator[Step]:
    """Return this rank's steps from `first_step` on."""
    return iter(
        DataLoader(
            _Steps(training_set, config, prepared, rank, world_size),
            batch_size=None,
            sampler=range(first_step, config.optimizer.num_steps),
            num_workers=num_workers,
            prefetch_factor=4 if num_workers else None,
            multiprocessing_context="spawn" if num_workers else None,
            worker_init_fn=_start_worker,
        )
    )


def _start_worker(number: int) -> None:
    end_with_parent()
