"""MLflow's store: a SQLite file, or the database or server that PF_MLFLOW_URI names.

MLflow tries again for minutes when it reaches nothing, and its errors are those of its libraries. So a store is reached
here first, and every call of the client turns an error into a sentence, which has no password.
"""

import contextlib
import functools
import http.client
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pf_core.errors import PipelineError
from pf_core.storage.disk import REMEDIES, disk_errors, disk_problem
from pf_core.storage.privacy import private

if TYPE_CHECKING:
    from mlflow import MlflowClient

VARIABLE = "PF_MLFLOW_URI"

TIMEOUT_S = 10

SQLITE = "sqlite:///"

KINDS = "postgresql://…, mysql://…, sqlite:///… or http://…"

INSTALLED_BY = {
    "psycopg": "pip install 'pinnerformer[production]', and write postgresql+psycopg2://…",
    "psycopg2": "pip install 'pinnerformer[production]'",
    "MySQLdb": "pip install mysqlclient, or name another driver, as in mysql+pymysql://…",
}
"""By the driver of a database: what installs it, where its own name does not."""

DATABASE = "mlflow.db"


def database_uri(root: Path) -> str:
    """Address of the database. It may contain a password: pass it to MLflow only, and never print it."""
    return os.environ.get(VARIABLE) or f"{SQLITE}{root / DATABASE}"


def is_database_there(root: Path) -> bool:
    """Return whether there is a database to read: MLflow would make the file, even to find nothing in it."""
    return bool(os.environ.get(VARIABLE)) or (root / DATABASE).exists()


def open_client(root: Path, uri: str) -> "MlflowClient":
    """Return a client whose errors are sentences; the SQLite file in `root` is created if it is not there."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
    with private(root):
        with disk_errors(root, "MLflow's database"):
            root.mkdir(parents=True, exist_ok=True)
            if not os.environ.get(VARIABLE):
                _create_file(root / DATABASE)
        refuse_if_unreachable(uri)
        with _sentences(uri):
            return cast("MlflowClient", _Guarded(_new_client(uri), uri))


def _new_client(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what is a sentence here
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _create_file(path: Path) -> None:
    """Create the SQLite file, with all of MLflow's tables, under another name, unless another process was faster."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _new_client(f"{SQLITE}{temporary}")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # a rename would replace the file of a faster process
    finally:
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink(missing_ok=True)


# Reaching it


def refuse_if_unreachable(uri: str) -> None:
    """Raise a PipelineError if there is no such store, its driver is not installed, or nobody answers."""
    scheme = uri.partition(":")[0]
    if scheme in ("http", "https"):
        _refuse_silent_server(uri)
    elif "://" in uri and scheme.partition("+")[0] in ("postgresql", "mysql", "mssql", "sqlite"):
        _refuse_silent_database(uri)
    else:
        raise PipelineError(f"{VARIABLE} is not the address of a database or of an MLflow server", f"write {KINDS}")


def _refuse_silent_server(uri: str) -> None:
    try:
        urllib.request.urlopen(f"{uri.partition(':')[0]}://{_place(uri).rstrip('/')}/health", timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return  # somebody answers; a server before MLflow may not know this page
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PipelineError(
            f"MLflow's server at {_place(uri)} does not answer: {_plain(str(reason), uri)}",
            f"start it, or correct {VARIABLE}",
        ) from None


def _refuse_silent_database(uri: str) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    timeout = {"timeout": TIMEOUT_S} if uri.startswith("sqlite") else {"connect_timeout": TIMEOUT_S}
    where = f"MLflow's database at {_place(uri)}"
    try:
        engine = create_engine(uri, connect_args=timeout)
    except ImportError as error:
        driver = (error.name or "its driver").partition(".")[0]
        raise PipelineError(
            f"{where} needs the Python package {driver}, which is not installed",
            f"install it: {INSTALLED_BY.get(driver, f'pip install {driver}')}",
        ) from None
    except SQLAlchemyError as error:
        raise PipelineError(
            f"{where} cannot be used: {_plain(str(error), uri)}", f"correct {VARIABLE}: {KINDS}"
        ) from None
    try:
        engine.connect().close()
    except DBAPIError as error:
        number = disk_problem(error)
        remedy = f"start it, or correct {VARIABLE}" if number is None else REMEDIES[number]
        raise PipelineError(f"{where} cannot be used: {_plain(str(error.orig), uri)}", remedy) from None
    finally:
        engine.dispose()


# Errors


class _Guarded:
    """MLflow's client, each of whose methods raises a PipelineError if the store fails."""

    def __init__(self, client: "MlflowClient", uri: str) -> None:
        self._client, self._uri = client, uri

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            with _sentences(self._uri):
                return method(*arguments, **named)

        return call


@contextlib.contextmanager
def _sentences(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        number = disk_problem(error)
        if isinstance(error, OSError) and number is None:
            raise
        if number is not None:
            raise PipelineError(
                f"MLflow's database: {os.strerror(number)}: {_place(uri)}", f"{REMEDIES[number]}, then re-run"
            ) from error
        raise PipelineError(f"MLflow at {_place(uri)}: {_plain(str(error), uri)}") from error


def _place(uri: str) -> str:
    """Return where a store is: host and path of its address, without user and password."""
    parts = urllib.parse.urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{host}{parts.path}" if host else parts.path.removeprefix("/")


def _plain(text: str, uri: str) -> str:
    """Return the first line of an error, without the password."""
    password = urllib.parse.urlsplit(uri).password
    first = text.strip().partition("\n")[0]
    return first.replace(password, "***") if password else first
