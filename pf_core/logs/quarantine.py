"""Quarantine: a Parquet file of rejected rows, with the source file, row number, reason and content of each.

While there are users on the deletion list, a row is kept without its content if nobody can tell whose it is: a
malformed line, a row without a readable user id, or with an id that looks like one of the list (`rejects.py`). File and
row number still say where it is.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.schemas import QUARANTINE_SCHEMA
from pf_core.storage.cache import fetched
from pf_core.storage.files import write_file

REDACTED = "(content removed: whose row it is cannot be told, and users were forgotten)"
"""Content of a row that may be that of a forgotten user."""

_FLUSH_ROWS = 65_536

_FLUSH_CHARS = 16 << 20


@dataclass
class Quarantine:
    """Writer of a quarantine file; the file is created with the first row."""

    path: Path
    held: list[tuple[str, int, str, str]] = field(default_factory=list)
    """Rows not yet written: source file, row number, reason, content."""
    num_chars: int = 0
    """Length of the contents of the rows not yet written."""
    by_reason: Counter[str] = field(default_factory=Counter)
    num_redacted: int = 0
    """Number of rows without their content."""
    writer: pq.ParquetWriter | None = None
    place: ExitStack = field(default_factory=ExitStack)

    def add(self, file: Path | str, row_number: int, reason: str, raw: str) -> None:
        self.held.append((str(file), row_number, reason, raw))
        self.num_chars += len(raw)
        self.by_reason[reason] += 1
        self.num_redacted += raw == REDACTED
        if len(self.held) >= _FLUSH_ROWS or self.num_chars >= _FLUSH_CHARS:
            self.flush()

    def absorb(self, path: Path) -> None:
        """Add all rows of another quarantine file."""
        with pq.ParquetFile(fetched(path)) as file:
            for batch in file.iter_batches(batch_size=_FLUSH_ROWS):
                self._write(pa.table(batch))
                for count in batch["reason"].value_counts().to_pylist():
                    self.by_reason[count["values"]] += count["counts"]
                self.num_redacted += pc.sum(pc.equal(batch["raw"], REDACTED)).as_py()

    def flush(self) -> None:
        if self.held:
            columns = [list(column) for column in zip(*self.held, strict=True)]
            self._write(pa.table(columns, schema=QUARANTINE_SCHEMA))
            self.held, self.num_chars = [], 0

    def _write(self, rows: pa.Table) -> None:
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.place.enter_context(write_file(self.path)), QUARANTINE_SCHEMA)
        self.writer.write_table(rows)

    def close(self) -> str | None:
        """Finish the file and return its name, or None if no row was rejected."""
        self.flush()
        if self.writer is None:
            return None
        self.writer.close()
        self.place.close()
        return self.path.name
