"""The files have the same bytes however they are written, and defects at the configured rates."""

import csv
import gzip
import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.world.config import DefectConfig, WorldConfig, ending_by, tiny
from pf_core.world.log_defects import LOG_COLUMNS, UNKNOWN_EVENTS
from pf_core.world.logs import find_config, read_config, write_logs
from pf_core.world.world import World

CLEAN = DefectConfig(duplicate=0, late_one_day=0, late_two_days=0, unknown_event=0, missing_dwell=0, malformed=0)


def small(**changes: Any) -> WorldConfig:
    return replace(tiny(num_users=250, num_days=6), users_per_chunk=100, sessions_per_day=1.0, **changes)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_parquet(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("actions/*/*.parquet"))])


def rows_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(table[name].to_pylist() for name in LOG_COLUMNS), strict=True))


@pytest.mark.parametrize("file_format", ["parquet", "csv.gz"])
def test_same_bytes_in_one_run_day_by_day_and_in_parallel(tmp_path: Path, file_format: Any) -> None:
    config = small()
    write_logs(config, tmp_path / "whole", file_format=file_format)
    for ds in reversed(config.dates):
        write_logs(config, tmp_path / "single", file_format=file_format, days=[ds])
    write_logs(config, tmp_path / "parallel", file_format=file_format, workers=2)
    whole = digests(tmp_path / "whole")
    assert whole == digests(tmp_path / "single")
    assert whole == digests(tmp_path / "parallel")
    assert "world.json" in whole
    assert sum(name.startswith("pins/") for name in whole) == 6


def test_days_written_together_are_the_same_days(tmp_path: Path) -> None:
    """With more chunks than stay in memory, several days are written at once."""
    config = replace(small(), users_per_chunk=40)
    assert config.num_chunks == 7
    written = write_logs(config, tmp_path / "whole")
    write_logs(config, tmp_path / "single", days=[config.dates[4]])
    alone = digests(tmp_path / "single" / "actions")
    assert alone == {k: v for k, v in digests(tmp_path / "whole" / "actions").items() if k.startswith(config.dates[4])}
    assert len(alone) == 7
    assert read_parquet(tmp_path / "whole").num_rows == written.num_rows


def test_a_part_holds_one_chunk_of_users(tmp_path: Path) -> None:
    config = small(dirt=CLEAN)
    write_logs(config, tmp_path, days=config.dates[:2])
    world = World(config)
    for path in tmp_path.glob("actions/*/*.parquet"):
        users = world.user_index(pq.read_table(path)["user"].to_numpy())
        assert set(users // 100) == {int(path.stem.removeprefix("part-"))}


def test_other_weeks_have_the_same_rows(tmp_path: Path) -> None:
    """Each time is exactly as many milliseconds later, and nothing else differs, also in another year's summer."""
    config = replace(small(), start_ds="2026-01-01")
    moved = ending_by(config, "2031-08-13")
    shift_ms = (moved.start_s - config.start_s) * 1000
    assert shift_ms % (7 * 86_400_000) == 0 < shift_ms
    for each in (config, moved):
        write_logs(each, tmp_path / each.start_ds)
    here, there = read_parquet(tmp_path / config.start_ds), read_parquet(tmp_path / moved.start_ds)
    far = here["event_time_ms"].to_numpy() == 99_999_999_999_999  # a defect
    assert (
        there["event_time_ms"].to_numpy().tolist()
        == np.where(far, here["event_time_ms"].to_numpy(), here["event_time_ms"].to_numpy() + shift_ms).tolist()
    )
    assert there.drop_columns("event_time_ms").equals(here.drop_columns("event_time_ms"))
    for before, after in zip(config.dates, moved.dates, strict=True):
        pins, later = (
            pq.read_table(tmp_path / c.start_ds / "pins" / f"{ds}.parquet")
            for c, ds in ((config, before), (moved, after))
        )
        assert later.drop_columns("created_ms").equals(pins.drop_columns("created_ms"))
        assert (later["created_ms"].to_numpy() - pins["created_ms"].to_numpy() == shift_ms).all()


def test_an_interrupted_run_is_completed(tmp_path: Path) -> None:
    config = small()

    def stop_at_third_day(line: str) -> None:
        if line.startswith(config.dates[2]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_logs(config, tmp_path / "logs", progress=stop_at_third_day)
    assert not (tmp_path / "logs" / "world.json").exists()
    assert find_config(tmp_path / "logs") == config
    assert sorted(path.name for path in (tmp_path / "logs" / "actions").iterdir()) == config.dates[:3]
    half_done = tmp_path / "logs" / ".writing" / config.dates[3] / "actions"
    half_done.mkdir(parents=True)
    (half_done / "part-00000.parquet").write_bytes(b"torn")

    with pytest.raises(ValueError, match="another world"):
        write_logs(replace(config, seed=9), tmp_path / "logs")
    written = write_logs(config, tmp_path / "logs")
    assert written.days_skipped == tuple(config.dates[:3])
    assert written.days_written == tuple(config.dates[3:])
    write_logs(config, tmp_path / "fresh")
    assert digests(tmp_path / "logs") == digests(tmp_path / "fresh")


def test_a_finished_world_is_not_written_again(tmp_path: Path) -> None:
    config = small()
    lines: list[str] = []
    write_logs(config, tmp_path, days=config.dates[:2], progress=lines.append)
    assert [line[:10] for line in lines] == config.dates[:2]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    again = write_logs(config, tmp_path, days=config.dates[:2])
    assert (again.num_rows, again.days_written) == (0, ())
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    content = json.loads((tmp_path / "world.json").read_text())
    assert content["days"] == config.dates[:2]
    assert read_config(tmp_path) == config


def test_foreign_directories_and_days_are_refused(tmp_path: Path) -> None:
    config = small()
    write_logs(config, tmp_path / "ours", days=config.dates[:1])
    with pytest.raises(ValueError, match="another world"):
        write_logs(replace(config, seed=1), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"as parquet, not .* as csv\.gz"):
        write_logs(config, tmp_path / "ours", file_format="csv.gz")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="not empty"):
        write_logs(config, tmp_path / "theirs")
    with pytest.raises(ValueError, match="2030-01-01 is not a day of this world"):
        write_logs(config, tmp_path / "new", days=["2030-01-01"])
    assert not (tmp_path / "new").exists()


def test_a_clean_log_is_the_truth(tmp_path: Path) -> None:
    config = small(dirt=CLEAN)
    write_logs(config, tmp_path)
    table = read_parquet(tmp_path)
    assert table.schema.names == list(LOG_COLUMNS)
    assert all(column.null_count == 0 for column in table.columns)
    world = World(config)
    truth = [world.actions(day, chunk) for day in range(6) for chunk in range(3)]
    assert (world.user_index(table["user"].to_numpy()) == np.concatenate([a.user for a in truth])).all()
    assert (world.pin_index(table["pin"]) == np.concatenate([a.pin for a in truth])).all()
    dwell = np.concatenate([a.duration_s for a in truth]) * 1000
    assert table["dwell_ms"].to_numpy() == pytest.approx(dwell, abs=0.5)
    assert set(table["surface"].to_pylist()) == {"home", "search", "related"}
    assert "save" in table["event"].to_pylist()
    assert "repin" not in table["event"].to_pylist()


def test_defects_have_their_rates_and_can_be_undone(tmp_path: Path) -> None:
    rates = DefectConfig(
        duplicate=0.04, late_one_day=0, late_two_days=0, unknown_event=0.03, missing_dwell=0.1, malformed=0.02
    )
    write_logs(small(dirt=CLEAN), tmp_path / "clean")
    write_logs(small(dirt=rates), tmp_path / "defective")
    clean, defective = rows_of(read_parquet(tmp_path / "clean")), rows_of(read_parquet(tmp_path / "defective"))
    num_true = clean.total()

    def is_near(count: int, rate: float) -> bool:
        return abs(count - num_true * rate) < 4.5 * np.sqrt(num_true * rate * (1 - rate))

    unknown = Counter({row: n for row, n in defective.items() if row[3] in UNKNOWN_EVENTS})
    malformed = Counter({row: n for row, n in defective.items() if is_malformed(row)})
    sound = defective - unknown - malformed
    assert is_near(unknown.total(), rates.unknown_event)
    assert is_near(malformed.total(), rates.malformed)
    assert is_near(sum(n - 1 for n in sound.values()), rates.duplicate)
    assert is_near(sum(row[5] is None for row in sound), rates.missing_dwell)
    # Without duplicates, the well-formed rows are the clean log, except for missing dwell times.
    assert {row[:5] for row in sound} == {row[:5] for row in clean}
    assert set(sound) - {row for row in sound if row[5] is None} <= set(clean)


def is_malformed(row: tuple[Any, ...]) -> bool:
    event_time_ms, user, _, _, _, dwell_ms = row
    return user is None or event_time_ms > 9e13 or (dwell_ms is not None and dwell_ms < 0)


def test_csv_and_parquet_have_the_same_rows(tmp_path: Path) -> None:
    config = small(dirt=DefectConfig(malformed=0.02))
    write_logs(config, tmp_path / "text", file_format="csv.gz")
    write_logs(config, tmp_path / "columns")
    sound: Counter[tuple[Any, ...]] = Counter()
    torn = Counter[str]()
    for path in sorted((tmp_path / "text").glob("actions/*/actions.csv.gz")):
        with gzip.open(path, "rt", newline="") as file:
            header, *lines = csv.reader(file)
        assert header == list(LOG_COLUMNS)
        for fields in lines:
            if len(fields) != 6:
                torn["too many fields" if len(fields) > 6 else "cut off"] += 1
            elif not fields[0].isdigit():
                torn["no time"] += 1
            elif not fields[1]:
                torn["no user"] += 1
            else:
                dwell = int(fields[5]) if fields[5] else None
                sound[int(fields[0]), int(fields[1]), fields[2], fields[3], fields[4], dwell] += 1
    assert set(torn) == {"too many fields", "cut off", "no time", "no user"}
    columns = rows_of(read_parquet(tmp_path / "columns"))
    malformed = Counter({row: n for row, n in columns.items() if is_malformed(row)})
    assert torn.total() == malformed.total()
    assert sound == columns - malformed


def test_late_rows_are_in_later_folders(tmp_path: Path) -> None:
    config = small(dirt=replace(CLEAN, late_one_day=0.1, late_two_days=0.1))
    write_logs(config, tmp_path)
    delays: Counter[int] = Counter()
    for day, ds in enumerate(config.dates):
        times = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "actions" / ds).iterdir())])
        of_event = (times["event_time_ms"].to_numpy() // 1000 - config.start_s) // 86_400
        delays.update((day - of_event).tolist())
    assert set(delays) == {0, 1, 2}


def test_pin_files_have_the_pins_that_exist_by_then(tmp_path: Path) -> None:
    config = small()
    write_logs(config, tmp_path)
    world = World(config)
    tables = [pq.read_table(tmp_path / "pins" / f"{ds}.parquet") for ds in config.dates]
    pins = pa.concat_tables(tables)
    assert pins.schema.field("vector").type == pa.list_(pa.float32(), 32)
    assert (world.pin_index(pins["pin"]) == np.arange(config.num_pins)).all()
    vectors = pins["vector"].combine_chunks().flatten().to_numpy().reshape(-1, 32)
    assert vectors == pytest.approx(world.vectors(), abs=1e-6)
    assert set(pins["topic"].to_pylist()) <= set(world.taxonomy.topic_names)
    assert (pins["on_homefeed"].to_numpy() == world.pins.is_candidate).all()
    for day, table in enumerate(tables[1:], 1):
        created_day = (table["created_ms"].to_numpy() // 1000 - config.start_s) // 86_400
        assert (created_day == day).all()
    # Every pin in a day's well-formed actions was described on an earlier day.
    described: set[str] = set()
    for ds, table in zip(config.dates, tables, strict=True):
        described |= set(table["pin"].to_pylist())
        for path in (tmp_path / "actions" / ds).iterdir():
            assert set(pq.read_table(path)["pin"].to_pylist()) <= described
