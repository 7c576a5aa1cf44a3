"""Locks: one writer of a folder at a time, no writer while others rely on the folder, and nothing removed while it is
read.

A run that relies on a folder (`relying_on`) keeps every writer out. A run that holds it (`holding`) does not: it has
opened some version, newer ones may be published meanwhile, and only the removal of older ones (`removing`) has to wait
for a later run.

On disk these are `flock`s, which end with their process. An object store has no locks; there they are leases, which
expire unless they are renewed. A writer holds the object `.lock`, which it creates on the condition that there is none
(If-None-Match); runs that rely on the folder have one object each under `.relying`. `.removing` and `.holding` are such
a pair, too. A run first writes its own object and then looks for those of others, so that of two runs that start
together at least one sees the other. A thread renews a lease; one that was not renewed for LEASE_S belongs to a run
that died. Ages are differences between times of the store, because the clock of this machine may jump.
"""

import contextlib
import errno
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
from pf_core.storage.disk import disk_errors
from pf_core.storage.files import is_refused, is_remote, object_store, reaching
from pf_core.storage.privacy import private

LEASE_S = 90.0
"""Seconds after which a lease that is not renewed expires."""

LOOK_EVERY_S = 1.0
"""Seconds between two looks of a run that waits until a removal in an object store has ended."""

LOCK, RELYING, REMOVING, HOLDING, CLOCK = ".lock", ".relying", ".removing", ".holding", ".clock"

OPPOSITE = {LOCK: RELYING, RELYING: LOCK, REMOVING: HOLDING, HOLDING: REMOVING}
"""Which leases exclude each other."""


class LockedError(PipelineError):
    """Another run has a lock that excludes the one that was wanted."""


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


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder for one writer; refused while another run writes it or relies on it.

    What is written meanwhile is private (`privacy.py`), and a problem of the disk is a sentence (`disk.py`).
    """
    refusal = f"another run is writing {what} or relying on it"
    lock = _leased(folder, LOCK, refusal) if is_remote(folder) else _locked(folder, fcntl.LOCK_EX, refusal, what)
    with disk_errors(folder, what), private(folder), lock:
        yield


def relying_on(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """Keep writers out of a folder; refused while another run writes it."""
    refusal = f"another run is writing {what}"
    return _leased(folder, RELYING, refusal) if is_remote(folder) else _locked(folder, fcntl.LOCK_SH, refusal, what)


@contextlib.contextmanager
def holding(folder: Path, what: str) -> Iterator[None]:
    """Keep everything that is published in a folder, while newer versions may be published.

    Waits while a run removes older versions.
    """
    if is_remote(folder):
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(_leased(folder, HOLDING, f"another run is removing older versions of {what}"))
                    break
                except LockedError:
                    time.sleep(LOOK_EVERY_S)
            yield
        return
    if not folder.is_dir():  # nothing is published there
        yield
        return
    with disk_errors(folder, what), private(folder):
        descriptor = _open_lock(folder / HOLDING)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def removing(folder: Path, what: str) -> Iterator[bool]:
    """Yield whether older versions may be removed: False while a run holds the folder."""
    refusal = f"another run is reading {what}"
    with contextlib.ExitStack() as stack:
        try:
            if is_remote(folder):
                stack.enter_context(_leased(folder, REMOVING, refusal))
            else:
                stack.enter_context(_locked(folder, fcntl.LOCK_EX, refusal, what, name=HOLDING))
            is_free = True
        except LockedError:
            is_free = False
        yield is_free


@contextlib.contextmanager
def _locked(folder: Path, kind: int, refusal: str, what: str, *, name: str = LOCK) -> Iterator[None]:
    """Hold a lock of the file system; it ends with its process."""
    with disk_errors(folder, what), private(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open_lock(folder / name)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LockedError(f"{refusal} in {folder}", "wait until it has ended, then re-run") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open the file of a lock; one that somebody else has made, or on a read-only disk, need not be writable."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.exists():
            raise
        return os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def _leased(folder: Path, name: str, refusal: str) -> Iterator[None]:
    """Hold a lease in an object store, and renew it in a thread. Many runs may rely on a folder, or hold it."""
    refused = LockedError(
        f"{refusal} in {folder}", f"wait until it has ended (if it was killed, {LEASE_S:.0f} s), then re-run"
    )
    store, root = object_store(folder)
    with reaching(folder):
        key = f"{root}/{name}" if name in (LOCK, REMOVING) else f"{root}/{name}/{uuid.uuid4().hex}"
        lease = _take(store, key, _now(store, root))
        if lease is None:
            raise refused
        if _is_held(store, root, OPPOSITE[name]):
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
