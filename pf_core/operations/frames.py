"""The data of a site as pandas frames, for a person who looks at it.

    timelines(site, "2026-03-31", users=[17, 42])

Columns are Arrow's (`pandas.ArrowDtype`): nothing is copied, ids keep their 64 bits, lists stay lists, and a missing
value is missing. A frame is bounded: by the users or pins that are asked for, or by `limit`, which takes the first rows
of the first buckets. Ids that are not there have no rows. `vectors` turns a column of vectors into a matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.logs.partition import bucket_files
from pf_core.pins.features import pin_state
from pf_core.schemas import TIMELINE_LISTS, id_arrow_type, raw_actions_schema
from pf_core.storage.files import read_parquet
from pf_core.timelines.build import stored_timelines, timeline_state

Ids = Sequence[int] | Sequence[str]


def raw_actions(site: Site, ds: str, *, users: Ids | None = None, limit: int | None = None) -> pd.DataFrame:
    """Return actions of a day, one row each: of some users, or the first ones."""
    files = bucket_files(site, ds)
    schema = raw_actions_schema(site.source.actions.user_id.type, site.source.actions.pin_id.type)

    def read(bucket: int, ids: pa.Array | None) -> pa.Table:
        table = read_parquet(files[bucket]) if bucket in files else schema.empty_table()
        return table if ids is None else table.filter(pc.is_in(table["user_id"], ids))

    return _frame(_by_bucket(site, users, limit, read))


def timelines(
    site: Site, ds: str, *, users: Ids | None = None, limit: int | None = None, newest: int | None = None
) -> pd.DataFrame:
    """Return timelines as of a day, one row for each action, oldest first: of some users, or the first `limit` users.

    With `newest`, at most that many of each user's newest actions.
    """
    with timeline_state(site).held(ds) as day:

        def read(bucket: int, ids: pa.Array | None) -> pa.Table:
            return stored_timelines(day, bucket).read(TIMELINE_LISTS, user_ids=ids, newest=newest)

        table = _by_bucket(site, users, limit, read).combine_chunks()
    lists = {name: table[name].combine_chunks() for name in TIMELINE_LISTS}
    user = pc.list_parent_indices(lists["ts"])
    flat = {name: values.flatten() for name, values in lists.items()}
    return _frame(pa.table({"user_id": table["user_id"].combine_chunks().take(user), **flat}))


def embeddings(site: Site, ds: str, *, users: Ids | None = None, limit: int | None = None) -> pd.DataFrame:
    """Return everybody's newest record as of a day, one row for each user: the vector, its model, the memory, the seen
    pins. Of some users, or the first ones."""
    with snapshot_state(site).held(ds) as day:

        def read(bucket: int, ids: pa.Array | None) -> pa.Table:
            dataset = day.open_bucket(bucket)
            if ids is None:
                return dataset.to_table(limit=limit)
            table = dataset.to_table()
            return table.filter(pc.is_in(table["user_id"], ids))

        return _frame(_by_bucket(site, users, limit, read))


def pins(site: Site, ds: str, *, pins: Ids | None = None, limit: int | None = None) -> pd.DataFrame:
    """Return pins as of a day: content vector (`feature`) if the site has any, interest, whether it may be
    recommended. Of some ids, or the first ones."""
    _check_bound(pins, limit, "pins")
    with pin_state(site).held(ds) as day:
        dataset = day.open_bucket(0)
        if pins is None:
            return _frame(dataset.to_table(limit=limit))
        ids = _ids(pins, dataset.schema.field("pin_id").type)
        parts = [batch.filter(pc.is_in(batch["pin_id"], ids)) for batch in dataset.to_batches()]
        return _frame(pa.Table.from_batches(parts, dataset.schema))


def scores(path: Path) -> pd.DataFrame:
    """Return what each evaluated user scored, one row for each way of embedding and user: NaN where undefined.

    `path` is the `scores.parquet` of offline_evaluation, which is also an artifact of the model's MLflow run.
    """
    return _frame(read_parquet(path))


def vectors(column: "pd.Series[Any]") -> np.ndarray:
    """Return a column of vectors as matrix of float32, one row each; a row without a vector is NaN."""
    kind = getattr(column.dtype, "pyarrow_dtype", None)
    if kind is None or not pa.types.is_fixed_size_list(kind):
        raise PipelineError(f"column {column.name!r} holds {column.dtype}, not vectors", "name a column of vectors")
    lists = pa.chunked_array(pa.array(column.array), type=kind)
    is_given = lists.is_valid()
    matrix = np.full((len(lists), kind.list_size), np.nan, np.float32)
    matrix[is_given.to_numpy()] = matrix_of(lists.filter(is_given))
    return matrix


def _by_bucket(
    site: Site, users: Ids | None, limit: int | None, read: Callable[[int, pa.Array | None], pa.Table]
) -> pa.Table:
    """Return the rows of some users, or the first `limit` rows, reading a bucket at a time."""
    _check_bound(users, limit, "users")
    tables: list[pa.Table] = []
    num_rows = 0
    for bucket, ids in _buckets(site, users):
        table = read(bucket, ids)
        tables.append(table if limit is None else table.slice(0, limit - num_rows))
        num_rows += len(tables[-1])
        if limit is not None and num_rows >= limit:
            break
    return pa.concat_tables(tables)


def _buckets(site: Site, users: Ids | None) -> Iterator[tuple[int, pa.Array | None]]:
    """Yield the buckets to read, with the ids to read from each."""
    num_buckets = site.timelines.num_buckets
    if users is None:
        yield from ((bucket, None) for bucket in range(num_buckets))
        return
    ids = _ids(users, id_arrow_type(site.source.actions.user_id.type))
    bucket = bucket_of(ids, num_buckets)
    for each in np.unique(bucket) if len(ids) else [0]:
        yield int(each), ids.filter(pa.array(bucket == each))


def _ids(ids: Ids, kind: pa.DataType) -> pa.Array:
    try:
        return pc.unique(pa.array(list(ids), kind)).sort()
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        wanted = "integers" if pa.types.is_integer(kind) else "strings"
        raise PipelineError(f"these are no ids of the site: {error}", f"its ids are {wanted}") from error


def _check_bound(ids: Ids | None, limit: int | None, name: str) -> None:
    if (ids is None) == (limit is None):
        raise PipelineError(f"give either `{name}` or `limit`", f"limit=1000 takes the first 1,000 {name}")
    if limit is not None and limit < 1:
        raise PipelineError(f"limit is {limit}", "give at least 1")


def _frame(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper=pd.ArrowDtype)
