"""MLflow's database: a SQLite file, or the database that PF_MLFLOW_URI names."""

import os
from pathlib import Path

from pf_core.errors import PipelineError


def database_uri(root: Path) -> str:
    """Address of the database. It may contain a password: pass it to MLflow only, and never print it."""
    return os.environ.get("PF_MLFLOW_URI") or f"sqlite:///{root / 'mlflow.db'}"


def refuse_if_unreachable(uri: str) -> None:
    """Raise a PipelineError if a Postgres database cannot be used: MLflow itself would retry for minutes."""
    from sqlalchemy import create_engine, make_url
    from sqlalchemy.exc import OperationalError

    if not uri.startswith("postgresql"):
        return
    engine = create_engine(uri, connect_args={"connect_timeout": 10})
    try:
        engine.connect().close()
    except OperationalError as error:
        where = make_url(uri).render_as_string(hide_password=True).partition("@")[2]
        raise PipelineError(f"MLflow's database at {where} (PF_MLFLOW_URI) cannot be used: {error.orig}") from None
    finally:
        engine.dispose()
