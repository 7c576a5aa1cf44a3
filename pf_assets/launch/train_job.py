"""What each rank of a training run does: `python -m torch.distributed.run … -m pf_assets.launch.train_job JOB.json`.

The configuration comes by file, because the ranks may be on other machines. The first rank reports through Dagster
Pipes if the run that started it is on the same machine, and prints otherwise. A rank that dies ends the others, and
torch.distributed.run starts all of them again, to continue from the last checkpoint in the same Pipes session. A
training that stops on purpose (it diverged, its data is gone) would stop again: it writes the reason to `stopped.json`
and ends in peace, so that nothing restarts it.

With --attached, standard input is a pipe that the launching process holds open. It closes when that process ends,
however it ends, and the rank goes with it.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import dagster_pipes

from pf_core.config.base import Strict
from pf_core.config.training import TrainConfig
from pf_core.errors import PipelineError
from pf_core.storage.files import is_remote, path_of, write_if_unchanged, write_json

STOPPED = "stopped.json"

LINE_EVERY_S = 3.0


class TrainJob(Strict):
    """The job file."""

    config: TrainConfig
    training_set: str
    run_dir: str
    num_workers: int


class PipesObserver:
    """Every measurement as a message, and in words for the run's log, of each kind a line every few seconds."""

    def __init__(self, pipes: dagster_pipes.PipesContext) -> None:
        self._pipes = pipes
        self._measured: frozenset[str] = frozenset()
        self._said_at: dict[frozenset[str], float] = {}

    def say(self, message: str) -> None:
        now = time.monotonic()
        if not self._measured or now - self._said_at.get(self._measured, -LINE_EVERY_S) >= LINE_EVERY_S:
            self._pipes.log.info(message)
            self._said_at[self._measured] = now
        self._measured = frozenset()

    def measure(self, step: int, values: dict[str, float]) -> None:
        self._measured = frozenset(values)  # the line that follows says the same
        self._pipes.report_custom_message({"step": step, **values})


class PrintObserver:
    def say(self, message: str) -> None:
        print(message, flush=True)

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass  # the trainer keeps it in history.jsonl


def main(arguments: list[str]) -> None:
    if "--attached" in arguments:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    job = TrainJob.model_validate_json(path_of(arguments[0]).read_text())
    run_dir = path_of(job.run_dir)
    rank, attempt = (int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    if attempt > 0 and (run_dir / STOPPED).exists():
        return  # another rank stopped on purpose, and this one only lost the connection to it
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
    """Keep an attempt's first error: those of the other ranks follow from it."""
    path, content = run_dir / f"crash-{attempt:03d}.json", {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    if is_remote(path):
        write_if_unchanged(path, json.dumps(content), None)
        return
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        json.dump(content, file)


def _end_with_launcher() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)  # a rank leads a group of its own, with its sampling workers


if __name__ == "__main__":
    main(sys.argv[1:])
