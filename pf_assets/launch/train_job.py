"""What each rank of a training run does: `python -m torch.distributed.run … -m pf_assets.launch.train_job JOB.json`.

The configuration is in a file, because the ranks may be on other machines. The first rank reports through Dagster Pipes
if the run that started it is on the same machine, and prints otherwise. When a rank dies, torch.distributed.run ends
the others and starts all of them again; they continue from the last checkpoint, in the same Pipes session. A training
that stops deliberately (it diverged, its data is missing) would stop again: it writes the reason to `stopped.json` and
exits with code 0, so that nothing restarts it.

With --attached, standard input is a pipe that the launching process holds open. The pipe closes when that process ends
for any reason, and the rank then ends, too.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import dagster_pipes

from pf_core.config.base import Strict
from pf_core.config.training import TrainConfig
from pf_core.errors import PipelineError
from pf_core.progress import Throttle
from pf_core.storage.files import is_remote, path_of, write_if_unchanged, write_json

STOPPED = "stopped.json"
"""File in a run's folder with the reason of a deliberate stop."""

LINE_EVERY_S = 3.0
"""Seconds between two lines of the same kind in the run's log."""


class TrainJob(Strict):
    """Content of the job file."""

    config: TrainConfig
    training_set: str
    run_dir: str
    num_workers: int
    data_read_at: str | None = None
    """When the files of the training set began to be written, ISO 8601: users forgotten since then may be in it."""


class PipesObserver:
    """Reports through Dagster Pipes: measurements as messages, and lines in the run's log.

    A line that repeats a measurement is throttled, separately for each kind (each set of measured names).
    """

    def __init__(self, pipes: dagster_pipes.PipesContext) -> None:
        self._pipes = pipes
        self._measured: frozenset[str] = frozenset()
        self._lines: dict[frozenset[str], Throttle] = {}

    def say(self, message: str) -> None:
        kind, self._measured = self._measured, frozenset()
        if kind in self._lines:
            self._lines[kind](message)
            return
        self._pipes.log.info(message)
        if kind:
            self._lines[kind] = Throttle(self._pipes.log.info, every_s=LINE_EVERY_S)

    def measure(self, step: int, values: dict[str, float]) -> None:
        self._measured = frozenset(values)  # the next line repeats these values
        self._pipes.report_custom_message({"step": step, **values})


class PrintObserver:
    """Prints every line; the trainer keeps measurements in history.jsonl."""

    def say(self, message: str) -> None:
        print(message, flush=True)

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def main(arguments: list[str]) -> None:
    if "--attached" in arguments:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    job = TrainJob.model_validate_json(path_of(arguments[0]).read_text())
    run_dir = path_of(job.run_dir)
    rank, attempt = (int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    if attempt > 0 and (run_dir / STOPPED).exists():
        return  # another rank stopped deliberately, and this one only lost the connection to it
    pipes = None
    if rank == 0 and dagster_pipes.DAGSTER_PIPES_CONTEXT_ENV_VAR in os.environ:
        pipes = dagster_pipes.open_dagster_pipes()
    try:
        _train(job, run_dir, PrintObserver() if pipes is None else PipesObserver(pipes))
    except PipelineError as error:
        write_json(run_dir / STOPPED, {"reason": str(error)})
    except Exception as error:
        _note_crash(run_dir, rank, attempt, error)
        raise
    if pipes is not None:
        pipes.close()  # not after a crash: the next attempt writes to the same session


def _train(job: TrainJob, run_dir: Path, observer: PipesObserver | PrintObserver) -> None:
    from pf_core.training.trainer import train  # imports torch; the launching process reads this module without it

    train(
        job.config,
        training_set=path_of(job.training_set),
        run_dir=run_dir,
        num_workers=job.num_workers,
        observer=observer,
    )


def _note_crash(run_dir: Path, rank: int, attempt: int, error: Exception) -> None:
    """Write the first error of an attempt to a file: the errors of the other ranks follow from it."""
    path, content = run_dir / f"crash-{attempt:03d}.json", {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    if is_remote(path):
        write_if_unchanged(path, json.dumps(content), None)
        return
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        json.dump(content, file)


def _end_with_launcher() -> None:
    """Wait until the launching process closes the pipe, then kill this rank and its workers."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the rank leads a process group with its sampling workers


if __name__ == "__main__":
    main(sys.argv[1:])
