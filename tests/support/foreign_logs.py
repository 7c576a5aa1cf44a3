"""Small logs in the shapes that people have, for `pf init`; what is in them is invented."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2024, 3, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Row:
    """An action of a small world."""

    user: int
    pin: int
    at: datetime
    number: int


def actions(*, days: int = 30, users: int = 40, pins: int = 60, per_day: int = 80, seed: int = 0) -> list[Row]:
    """Actions in the order of time; users and pins are as popular as their numbers are small."""
    rng = np.random.default_rng(seed)
    rows = []
    for day in range(days):
        seconds = np.sort(rng.integers(86_400, size=per_day))
        for second in seconds.tolist():
            user = int(users * rng.random() ** 1.5)
            pin = int(pins * rng.random() ** 2)
            rows.append(Row(user, pin, START + timedelta(days=day, seconds=second), len(rows)))
    return rows


def write_lines(path: Path, lines: Sequence[str], *, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(encoding)))
    else:
        path.write_text(text, encoding=encoding)
    return path


def shop(folder: Path) -> Path:
    """Daily CSVs of a shop: invoices, a date as Americans write it, customers missing, returns."""
    rows = actions()
    for day in range(30):
        own = [row for row in rows if (row.at - START).days == day]
        lines = ["InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"]
        for row in own:
            quantity = -1 if row.number % 50 == 7 else 1 + row.number % 12
            customer = "" if row.number % 4 == 1 else f"{12346 + row.user}"
            stock = f"{21000 + row.pin}{'A' if row.pin % 7 == 0 else ''}"
            at = f"{row.at.month}/{row.at.day}/{row.at.year} {row.at.hour}:{row.at.minute:02d}"
            name = f'"HEART, No. {row.pin}"' if row.pin % 3 else f"LANTERN {row.pin}"
            lines.append(
                f"{'C' if quantity < 0 else ''}{536365 + row.number // 3},{stock},{name},{quantity},{at},"
                f"{1 + row.pin % 9}.{row.pin % 10}5,{customer},United Kingdom"
            )
        write_lines(folder / f"sales_{START + timedelta(days=day):%Y-%m-%d}.csv", lines)
    return folder


def events(folder: Path) -> Path:
    """An event table in Parquet, with timestamps of a zone, and events without a product."""
    kinds = ["view", "view", "view", "view", "add_to_cart", "purchase", "remove_from_cart", "search"]
    rows = [(row, kinds[row.number % len(kinds)]) for row in actions()]
    table = pa.table(
        {
            "event_id": [f"{row.number:032x}" for row, _ in rows],
            "event_name": [kind for _, kind in rows],
            "visitor_id": [f"v-{row.user:05d}" for row, _ in rows],
            "product_id": pa.array([None if kind == "search" else 1000 + row.pin for row, kind in rows], pa.int64()),
            "occurred_at": pa.array([row.at for row, _ in rows], pa.timestamp("us", "Europe/Berlin")),
            "page_type": ["search" if kind == "search" else "detail" for _, kind in rows],
            "dwell_seconds": [float(row.number % 90) for row, _ in rows],
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "events.parquet", row_group_size=500)
    return folder / "events.parquet"


def ratings(folder: Path) -> Path:
    """Ratings separated by ::, no header, and films with leading zeros beside them."""
    lines = [f"{1 + row.user}::{row.pin:07d}::{1 + row.number % 10}::{int(row.at.timestamp())}" for row in actions()]
    write_lines(folder / "ratings.dat", sorted(lines, key=lambda line: int(line.partition("::")[0])))
    genres = ["Drama", "Comedy|Drama", "Horror"]
    write_lines(folder / "movies.dat", [f"{pin:07d}::Film {pin} (1999)::{genres[pin % 3]}" for pin in range(80)])
    return folder


def plays(folder: Path) -> Path:
    """Tab-separated plays without a header: user, time, artist id, artist, track id, track."""
    lines = [
        f"user_{row.user:06d}\t{row.at:%Y-%m-%dT%H:%M:%SZ}\t{_uuid(row.pin // 5, 1)}\tArtist {row.pin // 5}\t"
        f"{_uuid(row.pin, 2)}\tTrack No {row.pin}"
        for row in reversed(actions())
    ]
    return write_lines(folder / "plays.tsv.gz", lines)


def _uuid(number: int, kind: int) -> str:
    return f"{number * 2654435761 % 2**32:08x}-0000-4000-8000-{kind:012x}"


def documents(folder: Path) -> Path:
    """JSON lines with objects within them, and other keys in some rows."""
    lines = []
    for row in actions():
        kind = "article_read" if row.number % 3 else "article_shared"
        content = {
            "type": kind,
            "actor": {"userId": f"u{row.user}", "country": "DE"},
            "object": {"article": {"id": row.pin, "section": f"s{row.pin % 4}"}},
            "context": {"timestamp": int(row.at.timestamp() * 1000), "page": ["home", "topic"][row.pin % 2]},
        }
        if row.number % 5 == 0:
            content["experiment"] = "b"
        lines.append(json.dumps(content))
    return write_lines(folder / "stream.jsonl", lines)


def movielens(folder: Path) -> Path:
    """ratings.csv of MovieLens with tags.csv, movies.csv and links.csv beside it."""
    rows = actions()
    stars = [0.5 + 0.5 * (row.number % 10) for row in rows]
    write_lines(
        folder / "ratings.csv",
        [
            "userId,movieId,rating,timestamp",
            *(f"{1 + r.user},{1 + r.pin},{s},{int(r.at.timestamp())}" for r, s in zip(rows, stars, strict=True)),
        ],
    )
    write_lines(
        folder / "tags.csv",
        [
            "userId,movieId,tag,timestamp",
            *(f"{r.user + 1},{r.pin + 1},funny,{int(r.at.timestamp())}" for r in rows[::9]),
        ],
    )
    write_lines(
        folder / "movies.csv",
        [
            "movieId,title,genres",
            *(f'{pin + 1},"Film, The {pin}",{["Drama", "Comedy|War"][pin % 2]}' for pin in range(60)),
        ],
    )
    write_lines(folder / "links.csv", ["movieId,imdbId,tmdbId", *(f"{p + 1},{7 * p + 113},{p + 9}" for p in range(60))])
    return folder


def advertising(folder: Path) -> Path:
    """Tab-separated impressions of advertising: hashed ids, -1 for nothing, flags for click and sale."""
    lines = ["Sale\tclick\tclick_timestamp\tproduct_price\tdevice_type\tproduct_id\tpartner_id\tuser_id"]
    for row in actions(per_day=160):
        click = int(row.number % 4 != 0)
        lines.append(
            f"{int(row.number % 40 == 1)}\t{click}\t{int(row.at.timestamp())}\t{row.pin * 3.5}\t"
            f"{_hash(row.number % 3, 'd')}\t{_hash(row.pin, 'p')}\t{_hash(row.pin % 5, 'x')}\t{_hash(row.user, 'u')}"
        )
    return write_lines(folder / "impressions.tsv", lines)


def _hash(number: int, salt: str) -> str:
    return f"{(number + ord(salt) * 1000) * 0x9E3779B97F4A7C15 % 2**64:016X}"


LOGS: dict[str, Callable[[Path], Path]] = {
    "shop": shop,
    "events": events,
    "ratings": ratings,
    "plays": plays,
    "documents": documents,
    "movielens": movielens,
    "advertising": advertising,
}
"""Writers of the logs; each returns the path that a person would give to `pf init`."""
