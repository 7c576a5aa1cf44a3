"""One writer at a time in a folder of an object store, which has no locks: leases, which expire unless renewed.

A writer holds the object `.lock`, made on the condition that there is none (If-None-Match); those who rely on the
folder hold one each under `.relying`. Whoever comes writes his own first and then looks for others', so that of two who
come together at least one sees the other. A thread renews what is held, and what was not renewed for LEASE_S belongs to
somebody who died. Ages are differences of the store's own times: this machine's clock may jump.
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

LOCK, RELYING, CLOCK = ".lock", ".relying", ".clock"


@dataclass
class _Lease:
    """An object that is ours as long as its ETag is the one that we were told last."""

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
        """Lost is what somebody else has taken, or what could not be renewed in time."""
        try:
            self.etag = self.store.call_s3("put_object", **self.address, Body=_holder(), IfMatch=self.etag)["ETag"]
            self.renewed = time.monotonic()
        except Exception as error:
            self.is_lost |= is_refused(error) or time.monotonic() - self.renewed > LEASE_S

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.store.call_s3("delete_object", **self.address)


def exclusive_lease(folder: Path, otherwise: str) -> contextlib.AbstractContextManager[None]:
    return _held(folder, LOCK, otherwise)


def shared_lease(folder: Path, otherwise: str) -> contextlib.AbstractContextManager[None]:
    return _held(folder, f"{RELYING}/{uuid.uuid4().hex}", otherwise)


@contextlib.contextmanager
def _held(folder: Path, name: str, otherwise: str) -> Iterator[None]:
    refusal = PipelineError(
        f"{otherwise} in {folder}; wait until it has ended (if it was killed, {LEASE_S:.0f} s), then re-run"
    )
    store, root = object_store(folder)
    with reaching(folder):
        lease = _take(store, f"{root}/{name}", _now(store, root))
        if lease is None:
            raise refusal
        if _is_held(store, root, RELYING if name == LOCK else LOCK):
            lease.release()
            raise refusal
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
                "may have written there: re-run"
            )
    finally:
        is_over.set()
        renewal.join()
        if not lease.is_lost:
            lease.release()


def _take(store: Any, key: str, now: datetime) -> _Lease | None:
    """None if somebody else has it."""
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
            continue  # it was given back between
        if (now - found["LastModified"]).total_seconds() < LEASE_S:
            return None
        lease.etag = found["ETag"]
        lease.renew()
        return None if lease.is_lost else lease


def _is_held(store: Any, root: str, name: str) -> bool:
    now = _now(store, root)
    found = store.find(f"{root}/{name}", detail=True).values()
    return any((now - info["LastModified"]).total_seconds() < LEASE_S for info in found)


def _now(store: Any, root: str) -> datetime:
    """The store's own time."""
    probe = _Lease(store, f"{root}/{CLOCK}/{uuid.uuid4().hex}", "")
    store.call_s3("put_object", **probe.address, Body=b"")
    now: datetime = store.call_s3("head_object", **probe.address)["LastModified"]
    probe.release()
    return now


def _holder() -> bytes:
    """Read by people who wonder who holds it."""
    return f"{socket.gethostname()} {os.getpid()}".encode()


def exclusive(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """One writer of a folder at a time, and nobody who relies on it; the lock dies with its process."""
    otherwise = f"another run is writing {what} or relying on it"
    return exclusive_lease(folder, otherwise) if is_remote(folder) else _locked(folder, fcntl.LOCK_EX, otherwise)


def relying_on(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """While this lasts, nobody replaces what is in the folder."""
    otherwise = f"another run is writing {what}"
    return shared_lease(folder, otherwise) if is_remote(folder) else _locked(folder, fcntl.LOCK_SH, otherwise)


@contextlib.contextmanager
def _locked(folder: Path, kind: int, otherwise: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"{otherwise} in {folder}; wait until it has ended, then re-run") from None
        yield
