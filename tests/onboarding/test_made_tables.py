"""`pf init --yes` then `pf check` on tables that Hypothesis makes: the log comes back row for row, or what could not be
known is said.
"""

import csv
import gzip
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_core.config.site import Site, load_site
from pf_core.days import ds_range
from pf_core.logs.preview import LogPreview
from pf_core.logs.readers import find_files, read_file

USER_NAMES = ["user_id", "userId", "CustomerID", "visitorid", "member", "uid", "account_id", "x1"]
PIN_NAMES = ["item_id", "productId", "movie", "StockCode", "article.id", "track_id", "asin", "x2"]
TIME_NAMES = ["timestamp", "ts", "event_time", "InvoiceDate", "created_at", "datetime", "x3"]
ACTION_NAMES = ["event", "action_type", "behavior", "event_name"]
UNNAMED = {"x1", "x2", "x3"}
"""Names that say nothing."""

IDS: dict[str, Callable[[int], str]] = {
    "int": lambda number: str(number + 1),
    "large": lambda number: str(10**12 + 7 * number),
    "text": lambda number: f"k{number:04d}",
    "zeros": lambda number: f"{number:07d}",
    "hex": lambda number: f"{(number + 3) * 0x9E3779B97F4A7C15 % 2**64:016x}",
}

TIMES: dict[str, Callable[[datetime], str]] = {
    "s": lambda at: str(int(at.timestamp())),
    "ms": lambda at: str(int(at.timestamp()) * 1000),
    "us": lambda at: str(int(at.timestamp()) * 1_000_000),
    "float": lambda at: f"{int(at.timestamp())}.0",
    "iso": lambda at: f"{at:%Y-%m-%dT%H:%M:%SZ}",
    "naive": lambda at: f"{at:%Y-%m-%d %H:%M:%S}",
    "offset": lambda at: at.astimezone(timezone(timedelta(hours=2))).isoformat(),
    "american": lambda at: f"{at.month}/{at.day}/{at.year} {at.hour}:{at:%M:%S}",
    "german": lambda at: f"{at:%d.%m.%Y %H:%M:%S}",
    "compact": lambda at: f"{at:%Y%m%d%H%M%S}",
    "log": lambda at: f"{at:%d/%b/%Y:%H:%M:%S +0000}",
    "half": lambda at: f"{at:%b %d, %Y %I:%M:%S %p}",
}

ACTIONS = [["view", "purchase"], ["click", "like", "hide"], ["1", "2", "3", "4"], ["pv", "fav", "cart", "buy"]]


@dataclass(frozen=True)
class Spec:
    """What decides a log."""

    seed: int
    num_rows: int
    num_days: int
    num_users: int
    num_pins: int
    user: str
    pin: str
    time: str
    user_ids: str
    pin_ids: str
    times: str
    action: str | None
    kinds: list[str]
    extra: list[str]
    order: int
    """Seed of the order of the columns."""


SPECS = st.builds(
    Spec,
    seed=st.integers(0, 2**32),
    num_rows=st.integers(150, 400),
    num_days=st.integers(15, 70),
    num_users=st.integers(12, 30),
    num_pins=st.integers(8, 40),
    user=st.sampled_from(USER_NAMES),
    pin=st.sampled_from(PIN_NAMES),
    time=st.sampled_from(TIME_NAMES),
    user_ids=st.sampled_from(list(IDS)),
    pin_ids=st.sampled_from(list(IDS)),
    times=st.sampled_from(list(TIMES)),
    action=st.none() | st.sampled_from(ACTION_NAMES),
    kinds=st.sampled_from(ACTIONS),
    extra=st.lists(st.sampled_from(["price", "session_id", "title"]), unique=True),
    order=st.integers(0, 2**32),
)


@dataclass(frozen=True)
class Table:
    """A log as columns of text, and the rows as they are meant."""

    columns: dict[str, list[str]]
    rows: list[tuple[str, str, datetime]]

    @property
    def names(self) -> list[str]:
        return list(self.columns)


def table_of(spec: Spec) -> Table:
    rng, num = np.random.default_rng(spec.seed), spec.num_rows
    start = datetime(2023, 1 + spec.seed % 6, 10, tzinfo=UTC)
    at = [start + timedelta(seconds=int(each)) for each in np.sort(rng.integers(spec.num_days * 86_400, size=num))]
    users = [IDS[spec.user_ids](int(number)) for number in rng.integers(spec.num_users, size=num)]
    pins = [IDS[spec.pin_ids](int(number)) for number in rng.integers(spec.num_pins, size=num)]
    columns = {spec.user: users, spec.pin: pins, spec.time: [TIMES[spec.times](each) for each in at]}
    if spec.action is not None:
        columns[spec.action] = [spec.kinds[int(number)] for number in rng.integers(len(spec.kinds), size=num)]
    extra = {
        "price": [f"{number:.2f}" for number in rng.random(num) * 90],
        "session_id": [f"s{number // 3}" for number in range(num)],
        "title": [f"Thing, no. {pin}" for pin in pins],
    }
    columns |= {name: extra[name] for name in spec.extra}
    names = np.random.default_rng(spec.order).permutation(list(columns)).tolist()
    return Table({name: columns[name] for name in names}, list(zip(users, pins, at, strict=True)))


def write_csv(table: Table, folder: Path, delimiter: str, *, has_header: bool, is_compressed: bool) -> None:
    lines = list(zip(*table.columns.values(), strict=True))
    if has_header:
        lines = [tuple(table.names), *lines]
    if len(delimiter) > 1:
        text = "".join(f"{delimiter.join(line)}\n" for line in lines)
    else:
        stream = io.StringIO()
        csv.writer(stream, delimiter=delimiter, lineterminator="\n").writerows(lines)
        text = stream.getvalue()
    if is_compressed:
        (folder / "log.csv.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / "log.csv").write_text(text)


def write_jsonl(table: Table, folder: Path) -> None:
    lines = []
    for values in zip(*table.columns.values(), strict=True):
        row: dict[str, Any] = {}
        for name, value in zip(table.names, values, strict=True):
            inner = row
            *objects, key = name.split(".")
            for each in objects:
                inner = inner.setdefault(each, {})
            inner[key] = int(value) if value.isdigit() and str(int(value)) == value else value
        lines.append(json.dumps(row))
    (folder / "log.jsonl").write_text("\n".join(lines))


def write_parquet(table: Table, folder: Path, time: str, *, is_typed: bool) -> None:
    arrays = {}
    for name, values in table.columns.items():
        is_number = is_typed and all(value.isdigit() and str(int(value)) == value for value in values)
        arrays[name] = pa.array([int(value) for value in values]) if is_number else pa.array(values)
    if is_typed:
        arrays[time] = pa.array([at for *_, at in table.rows], pa.timestamp("ms", "UTC"))
    pq.write_table(pa.table(arrays), folder / "log.parquet", row_group_size=100)


@st.composite
def forms(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["csv", "csv", "csv", "jsonl", "parquet"]))
    if kind == "csv":
        return {
            "kind": kind,
            "delimiter": draw(st.sampled_from([",", ";", "\t", "|", "::", "||", "~", " | "])),
            "has_header": draw(st.booleans()),
            "is_compressed": draw(st.booleans()),
        }
    return {"kind": kind} | ({"is_typed": draw(st.booleans())} if kind == "parquet" else {})


def write(table: Table, folder: Path, form: dict[str, Any], *, time: str) -> None:
    options = {name: value for name, value in form.items() if name != "kind"}
    options |= {"time": time} if form["kind"] == "parquet" else {}
    writers: dict[str, Callable[..., None]] = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}
    writers[form["kind"]](table, folder, **options)


def mapped(site: Site) -> Counter[tuple[str, str, datetime]]:
    """The rows that a run would keep."""
    source, logs = site.source.actions, LogPreview(site)
    found: Counter[tuple[str, str, datetime]] = Counter()
    for file in find_files(source, site.log_root):
        for batch in read_file(file, source, source.mapped_columns):
            for row in logs.map(batch, 0).actions.select(["user_id", "pin_id", "ts"]).to_pylist():
                found[str(row["user_id"]), str(row["pin_id"]), row["ts"]] += 1
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SPECS, forms())
@example(
    Spec(
        seed=0,
        num_rows=150,
        num_days=15,
        num_users=8,
        num_pins=8,
        user="user_id",
        pin="item_id",
        time="timestamp",
        user_ids="int",
        pin_ids="int",
        times="half",
        action=None,
        kinds=["view", "purchase"],
        extra=["price", "session_id", "title"],
        order=0,
    ),
    {"kind": "csv", "delimiter": "~", "has_header": False, "is_compressed": False},
)
@example(  # a column without a name beside sessions, of few rows
    Spec(
        seed=0,
        num_rows=150,
        num_days=44,
        num_users=8,
        num_pins=8,
        user="x1",
        pin="item_id",
        time="timestamp",
        user_ids="int",
        pin_ids="int",
        times="s",
        action=None,
        kinds=["view", "purchase"],
        extra=["session_id"],
        order=0,
    ),
    {"kind": "jsonl"},
)
@example(  # ids that could be milliseconds, beside times without a zone
    Spec(
        seed=0,
        num_rows=150,
        num_days=15,
        num_users=8,
        num_pins=8,
        user="user_id",
        pin="item_id",
        time="timestamp",
        user_ids="int",
        pin_ids="large",
        times="naive",
        action=None,
        kinds=["view", "purchase"],
        extra=[],
        order=0,
    ),
    {"kind": "csv", "delimiter": ",", "has_header": False, "is_compressed": False},
)
def test_a_log_comes_back_row_for_row_or_what_is_unsure_is_said(spec: Spec, form: dict[str, Any]) -> None:
    table = table_of(spec)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        write(table, folder / "logs", form, time=spec.time)
        result = CliRunner().invoke(app, ["init", str(folder / "logs"), "--yes", "--out", str(folder)])
        assert result.exit_code == 0, f"{result.output}\n{result.exception}"
        checked = CliRunner().invoke(app, ["check", str(folder / "site.yaml")])
        is_too_small = "note       With these columns, the log is too small to train on" in result.output
        assert checked.exit_code == int(is_too_small), f"{result.output}\n{checked.output}\n{checked.exception}"
        site = load_site(folder / "site.yaml", environment={})
        days = ds_range(site.start_ds, site.end_ds or "")
        expected = Counter(row for row in table.rows if row[2].date().isoformat() in days)
        if mapped(site) == expected:
            assert expected.total() > 0.8 * len(table.rows)
        else:  # only names can be doubtful, and then the output says which
            assert not form.get("has_header", True) or UNNAMED & {spec.user, spec.pin, spec.time}
            assert "unsure     Which column is the" in result.output, result.output
