"""A bounded sample of a group of files as one table, with how many rows of the log each row stands for.

What the first bytes of a file do not show is corrected here: letters that are not ASCII, and quotes that do not end,
may come late in a log.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pf_core.config.files import Files
from pf_core.errors import PipelineError
from pf_core.logs.remedies import NOT_UTF8, OPEN_QUOTE, remedy_of
from pf_core.logs.sample import Plan, plan_sample, raw_lines, read_piece
from pf_core.onboarding.encodings import cp1252_evidence
from pf_core.onboarding.folders import Group

SMALL_BYTES = 2 << 20
"""Bytes that are read of a group of files to see what it is."""

SAMPLE_BYTES = 48 << 20
"""Bytes that are read of the log and of a catalogue; smaller ones are read whole."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Rows of a group of files, in the order of the files."""

    group: Group
    plan: Plan
    table: pa.Table
    """All columns with plain values."""
    weight: np.ndarray
    """For each row, how many rows of the log it stands for."""
    file: np.ndarray
    """For each row, the index of its file in the group."""
    malformed: dict[str, int]
    """Number of lines that are no rows, by reason."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the log, estimated unless it was read whole."""
        return round(float(self.weight.sum()))

    def renamed(self, names: dict[str, str]) -> "Sampled":
        """Return the sample with other names of columns."""
        columns = [names.get(name, name) for name in self.table.column_names]
        own = self.group.layout
        files = own.files.model_copy(update={"columns": tuple(names.get(name, name) for name in own.columns)})
        layout = replace(own, files=files, columns=files.columns or ())
        group = Group(layout=layout, files=self.group.files)
        return replace(self, group=group, table=self.table.rename_columns(columns))


def sample_of(group: Group, max_bytes: int) -> Sampled:
    """Read a bounded part of a group of files. If quotes make lines unreadable, and nothing else, nothing is quoted."""
    found = _read(group, max_bytes)
    is_text = group.layout.files.file_format != "parquet"
    if is_text and (NOT_UTF8 in found.malformed or group.layout.files.encoding != "utf-8"):
        found = _in_its_encoding(found, max_bytes)
        group = found.group
    num_open = found.malformed.get(OPEN_QUOTE, 0)
    if num_open > 0.001 * found.table.num_rows:
        files = group.layout.files.model_copy(update={"quote": None})
        plain = _read(Group(layout=replace(group.layout, files=files), files=group.files), max_bytes)
        if sum(plain.malformed.values()) < num_open:
            found = plain
    if found.table.num_rows:
        return found
    if not found.malformed:
        raise PipelineError(f"{group} has no rows", "restore it, or leave it out")
    reason = max(found.malformed, key=found.malformed.__getitem__)
    raise PipelineError(f"no line of {group} is a row: {reason}", remedy_of(reason))


def _in_its_encoding(sampled: Sampled, max_bytes: int) -> Sampled:
    """Return the sample in the encoding that the lines of all its pieces show."""
    layout = sampled.group.layout
    evidence = cp1252_evidence(line for piece in sampled.plan.pieces for line in raw_lines(piece))
    files = layout.files.model_copy(update={"encoding": "utf-8" if evidence is None else "cp1252"})
    group = Group(layout=replace(layout, files=files, encoding_evidence=evidence), files=sampled.group.files)
    return replace(sampled, group=group) if files == layout.files else _read(group, max_bytes)


def _read(group: Group, max_bytes: int) -> Sampled:
    source: Files = group.layout.files
    plan = plan_sample(group.files, source, max_bytes=max_bytes)
    place = {file: number for number, file in enumerate(group.files)}
    tables: list[pa.Table] = []
    weights, files = [np.empty(0)], [np.empty(0, np.int64)]
    malformed: dict[str, int] = {}
    for piece in plan.pieces:
        for batch in read_piece(piece, source, list(group.layout.columns)):
            num_rows = len(batch.row_number)
            if num_rows or not tables:
                tables.append(batch.rows)
            weights.append(np.full(num_rows, piece.weight))
            files.append(np.full(num_rows, place[piece.file]))
            for _, reason, _ in batch.malformed:
                malformed[reason] = malformed.get(reason, 0) + 1
    return Sampled(
        group=group,
        plan=plan,
        table=pa.concat_tables([table for table in tables if table.num_rows] or tables, promote_options="permissive"),
        weight=np.concatenate(weights),
        file=np.concatenate(files),
        malformed=malformed,
    )
