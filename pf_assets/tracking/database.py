"""Where MLflow keeps what it knows: a SQLite file, or the database that PF_MLFLOW_URI names."""

import os
from pathlib import Path

from pf_core.errors import PipelineError


def database_uri(root: Path) -> str:
    """May hold a password: it is given to MLflow and to nobody else."""
    return os.environ.get("PF_MLFLOW_URI") or f"sqlite:///{root / 'mlflow.db'}"


def refuse_if_unreachable(uri: str) -> None:
    """MLflow itself would try a wrong password again and again, for minutes."""
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
