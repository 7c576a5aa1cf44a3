"""Python environments for other people's libraries: one for each list of pinned requirements, made on demand and kept.

An environment lies in a folder named after a hash of its requirements and of the Python version: changed requirements
make another one. An environment cannot be moved, so it is made in place, and a marker file, written last, declares it
complete; a folder without the marker is removed and made again. A lock keeps two processes from making the same one.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pf_core.errors import PipelineError
from pf_core.hashing import digest_of
from pf_core.progress import Progress

READY = ".ready"
INSTALL_TIMEOUT_S = 1_200
MAX_PIP_CHARS = 300


def cache_folder() -> Path:
    """Folder of the environments: $PF_CACHE_DIR/peers, or ~/.cache/pinnerformer/peers."""
    base = os.environ.get("PF_CACHE_DIR")
    return (Path(base) if base else Path.home() / ".cache" / "pinnerformer") / "peers"


def requirements_of(family: str) -> list[str]:
    """Pinned requirements of a family of peers: requirements/FAMILY.txt."""
    lines = (Path(__file__).parent / "requirements" / f"{family}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def environment_folder(requirements: Sequence[str], *, cache: Path) -> Path:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache / digest_of({"python": python, "requirements": list(requirements)})[:16]


def ensure_environment(requirements: Sequence[str], *, name: str, cache: Path, progress: Progress) -> Path:
    """Return the Python of the environment with these requirements; make it first if it is missing."""
    folder = environment_folder(requirements, cache=cache)
    python, ready = folder / "bin" / "python", folder / READY
    if ready.exists():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists():  # another process made it
            return python
        progress(f"installing the libraries of {name} in {folder} (once; takes some minutes)")
        shutil.rmtree(folder, ignore_errors=True)
        listed = folder.with_suffix(".txt")
        listed.write_text("\n".join(requirements) + "\n")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        make = [sys.executable, "-m", "venv", str(folder)]
        for command in (make, [*pip, "install", "-r", str(listed)]):
            failure = _failure(command)
            if failure is not None:
                shutil.rmtree(folder, ignore_errors=True)
                raise PipelineError(f"pip said: {failure}", f"check the network, or install by hand: see {listed}")
        ready.touch()
    return python


def _failure(command: Sequence[str]) -> str | None:
    """Run a command; return the last words of one that failed, None if it succeeded."""
    try:
        process = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"nothing for {INSTALL_TIMEOUT_S} s"
    if process.returncode == 0:
        return None
    errors = [line for line in process.stdout.splitlines() if line.startswith("ERROR")]
    return " ".join(errors or process.stdout.split("\n"))[-MAX_PIP_CHARS:].strip()
