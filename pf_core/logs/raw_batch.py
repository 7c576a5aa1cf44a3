"""What every reader yields: rows of a foreign file with their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.errors import PipelineError
from pf_core.logs.lines import MalformedRow
from pf_core.logs.remedies import column_remedy


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Consecutive rows of one file. Row numbers count from 1; a CSV's header is row 1."""

    file: Path
    rows: pa.Table
    row_number: np.ndarray
    malformed: list[MalformedRow] = field(default_factory=list)


def no_rows(path: Path, columns: Sequence[str], malformed: list[MalformedRow]) -> RawBatch:
    rows = pa.table({column: pa.array([], pa.string()) for column in columns})
    return RawBatch(file=path, rows=rows, row_number=np.empty(0, np.int64), malformed=malformed)


def check_columns(path: Path, present: Sequence[str], needed: Sequence[str]) -> None:
    missing = [column for column in needed if column not in present]
    if missing:
        raise PipelineError(
            f"{path} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present))}",
            column_remedy(present, missing),
        )
    repeated = {column for column in needed if list(present).count(column) > 1}
    if repeated:
        raise PipelineError(f"{path} has column {', '.join(map(repr, sorted(repeated)))} more than once")
