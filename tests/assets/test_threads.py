"""How many threads a training process gets."""

import os

import pytest

from pf_assets.launch.processes import settings_for
from pf_core.config.training_section import LaunchConfig


@pytest.mark.parametrize(
    ("in_site_file", "of_the_caller", "num_processes", "threads"),
    [
        (3, "2", 1, "3"),  # the site file decides
        (None, "2", 1, "2"),  # then the caller's environment
        (None, "2", 4, "2"),  # for each process, as everywhere else
        (None, "", 1, "share"),
        (None, "0", 1, "share"),
        (None, "4,2", 1, "share"),  # nested levels of OpenMP: torch would read the first, but a share is safe
        (None, None, 1, "share"),
        (None, None, 1_000, "1"),
    ],
)
def test_threads(
    in_site_file: int | None,
    of_the_caller: str | None,
    num_processes: int,
    threads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if of_the_caller is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", of_the_caller)
    launch = LaunchConfig(threads_per_process=in_site_file, processes_per_node=num_processes)
    expected = str(len(os.sched_getaffinity(0)) // num_processes) if threads == "share" else threads
    assert settings_for(launch)["OMP_NUM_THREADS"] == expected
