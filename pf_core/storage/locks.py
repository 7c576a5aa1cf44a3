"""Locks: one writer of a folder at a time, and no writer while others rely on the folder.

On disk these are `flock`s, which end with their process. An object store has no locks; there they are leases, which
expire unless they are renewed. A writer holds the object `.lock`, which it creates on the condition that there is none
(If-None-Match); runs that rely on the folder hold one object each under `.relying`. A run first writes its own object
and then looks for those of others, so that of two runs that start together at least one sees the other. A thread renews
a lease; one that was not renewed for LEASE_S belongs to a run that died. Ages are differences between times of the
store, because the clock of this machine may jump.
"""

import contextlib
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pf_core.errors import PipelineError
from pf_core.storage.files import is_refused, is_remote, object_store, reaching

LEASE_S = 90.0
"""Seconds after which a lease that is not renewed expires."""

LOCK, RELYING, CLOCK = ".lock", ".relying", ".clock"


@dataclass
class _Lease:
    """An object in the store that this run holds as long as the ETag is the one of its last write."""

    store: Any
    key: str
    etag: str
    is_lost: bool = False
    renewed: float = field(default_factory=time.monotonic)

    @property
    def address(self) -> dict[str, str]:
        bucket, _, key = self.key.partition("/")
        return {"Bucket": bucket, "Key": key}

    def renew(self) -> None:
        """Renew the lease; it is lost if another run has taken it, or if it could not be renewed in time."""
        try:
            self.etag = self.store.call_s3("put_object", **self.address, Body=_holder(), IfMatch=self.etag)["ETag"]
            self.renewed = time.monotonic()
        except Exception as error:
            self.is_lost |= is_refused(error) or time.monotonic() - self.renewed > LEASE_S

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.store.call_s3("delete_object", **self.address)


def exclusive(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """Lock a folder for one writer; refused while another run writes it or relies on it."""
    refusal = f"another run is writing {what} or relying on it"
    return _leased(folder, LOCK, refusal) if is_remote(folder) else _locked(folder, fcntl.LOCK_EX, refusal)


def relying_on(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """Keep writers out of a folder; refused while another run writes it."""
    refusal, name = f"another run is writing {what}", f"{RELYING}/{uuid.uuid4().hex}"
    return _leased(folder, name, refusal) if is_remote(folder) else _locked(folder, fcntl.LOCK_SH, refusal)


@contextlib.contextmanager
def _locked(folder: Path, kind: int, refusal: str) -> Iterator[None]:
    """Hold a lock of the file system; it ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"{refusal} in {folder}", "wait until it has ended, then re-run") from None
        yield


@contextlib.contextmanager
def _leased(folder: Path, name: str, refusal: str) -> Iterator[None]:
    """Hold a lease in an object store, and renew it in a thread."""
    refused = PipelineError(
        f"{refusal} in {folder}", f"wait until it has ended (if it was killed, {LEASE_S:.0f} s), then re-run"
    )
    store, root = object_store(folder)
    with reaching(folder):
        lease = _take(store, f"{root}/{name}", _now(store, root))
        if lease is None:
            raise refused
        if _is_held(store, root, RELYING if name == LOCK else LOCK):
            lease.release()
            raise refused
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(LEASE_S / 4):
            lease.renew()

    renewal = threading.Thread(target=renew, daemon=True)
    renewal.start()
    try:
        yield
        if lease.is_lost:
            raise PipelineError(
                f"the lease of {folder} was lost for a while (was this machine asleep, or cut off?), and another run "
                "may have written there",
                "re-run",
            )
    finally:
        is_over.set()
        renewal.join()
        if not lease.is_lost:
            lease.release()


def _take(store: Any, key: str, now: datetime) -> _Lease | None:
    """Create the lease, or take over an expired one; None if another run holds it."""
    lease = _Lease(store, key, "")
    while True:
        try:
            lease.etag = store.call_s3("put_object", **lease.address, Body=_holder(), IfNoneMatch="*")["ETag"]
            return lease
        except OSError as error:
            if not is_refused(error):
                raise
        try:
            found = store.call_s3("head_object", **lease.address)
        except FileNotFoundError:
            continue  # it was released in between
        if (now - found["LastModified"]).total_seconds() < LEASE_S:
            return None
        lease.etag = found["ETag"]
        lease.renew()
        return None if lease.is_lost else lease


def _is_held(store: Any, root: str, name: str) -> bool:
    """Whether any lease under this name has not expired."""
    now = _now(store, root)
    found = store.find(f"{root}/{name}", detail=True).values()
    return any((now - info["LastModified"]).total_seconds() < LEASE_S for info in found)


def _now(store: Any, root: str) -> datetime:
    """Time of the store: that of an object that is written now."""
    probe = _Lease(store, f"{root}/{CLOCK}/{uuid.uuid4().hex}", "")
    store.call_s3("put_object", **probe.address, Body=b"")
    now: datetime = store.call_s3("head_object", **probe.address)["LastModified"]
    probe.release()
    return now


def _holder() -> bytes:
    """Host and process that hold a lease, for people who look at the object."""
    return f"{socket.gethostname()} {os.getpid()}".encode()
