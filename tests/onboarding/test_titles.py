"""Logs whose pins are titles, beside columns of few values, of durations and of row numbers; with and without a table
of the titles."""

from pathlib import Path

import pytest
import yaml

from pf_core.onboarding.actions import kind_of
from tests.onboarding.test_many_logs import accepted
from tests.support.foreign_logs import actions, write_lines

ROWS = actions(users=200, pins=900, per_day=300)

GERMAN = "lfd;Kunde;Titel;Zeitpunkt;Vorgang;Bereich;Dauer_ms;App"
ENGLISH = "no;customer;title;time;event;page;duration_ms;app"
KINDS = {
    GERMAN: ["gehört", "gehört", "gestartet", "gemerkt", "übersprungen", "gekauft", "aus Merkliste entfernt"],
    ENGLISH: ["played", "played", "started", "saved", "skipped", "purchased", "removed"],
}
COLUMNS = {GERMAN: ("Kunde", "Titel", "Zeitpunkt", "Vorgang"), ENGLISH: ("customer", "title", "time", "event")}
TABLE = {
    GERMAN: ("titelliste.csv.gz", "Titel;Bezeichnung;Genre;Jahr;lieferbar"),
    ENGLISH: ("titles.csv", "title;label;genre;year;available"),
}


def title(number: int) -> str:
    return f"TT-{number:05d}"


def name(number: int) -> str:
    return f"Der Weg nach {number}"


def write_log(folder: Path, header: str, of: str = "code", *, without: tuple[str, ...] = ()) -> Path:
    """30 daily files, whose titles are codes or names; every 20th duration is -1, which is 12 of the 240 others."""
    names = header.split(";")
    kept = [place for place, each in enumerate(names) if each not in without]
    days: dict[str, list[str]] = {}
    for row in ROWS:
        values = [
            str(row.number + 1),
            f"K{row.user:04d}",
            title(row.pin) if of == "code" else name(row.pin),
            f"{row.at:%d.%m.%Y %H:%M:%S}",
            KINDS[header][row.number % 7],
            ["Start", "Suche", "Liste", "Profil"][row.number % 4],
            "-1" if row.number % 20 == 0 else str(1000 * (row.number % 240)),
            ["Android", "iOS", "Web"][row.number % 3],
        ]
        days.setdefault(f"{row.at:%Y-%m-%d}", []).append(";".join(values[place] for place in kept))
    for day, lines in days.items():
        write_lines(folder / f"{day}.csv.gz", [";".join(names[place] for place in kept), *lines])
    return folder


def write_table(folder: Path, header: str, of: str = "code") -> Path:
    file, columns = TABLE[header]
    genres = ["Jazz", "Rock", "Pop"]
    lines = [
        f"{title(pin) if of == 'code' else name(pin)};No. {pin};{genres[pin % 3]};{1990 + pin % 30};{pin % 2}"
        for pin in range(900)
    ]
    return write_lines(folder / file, [columns, *lines])


@pytest.mark.parametrize("of", ["code", "name"])
@pytest.mark.parametrize("header", [GERMAN, ENGLISH])
@pytest.mark.parametrize("table", ["none", "beside", "named"])
def test_titles_are_the_pins(tmp_path: Path, header: str, table: str, of: str) -> None:
    logs = write_log(tmp_path / "logs", header, of)
    options: list[str] = []
    if table == "beside":
        write_table(logs, header, of)
    elif table == "named":
        options = ["--catalogue", str(write_table(tmp_path / "tables", header, of))]
    found, output, checked = accepted(logs, tmp_path, *options)
    user, pin, time, event = COLUMNS[header]
    assert found["user_id"] == {"column": user, "type": "string"}
    assert found["pin_id"] == {"column": pin, "type": "string"}
    assert found["ts"] == {"column": time, "format": "%d.%m.%Y %H:%M:%S"}
    assert found["action_type"] == event
    assert "unsure     Which column" not in output
    if table != "none":
        assert f"its values are those of column {pin} of {TABLE[header][0]}, which has each once" in output
        assert "catalogue  900 pins, with all of those of the log" in checked
    positive = yaml.safe_load((tmp_path / "site.yaml").read_text())["source"]["positive"]["action_types"]
    assert sorted(positive) == sorted({*KINDS[header][:4], KINDS[header][5]})  # neither skipped nor removed


@pytest.mark.parametrize("header", [GERMAN, ENGLISH])
def test_without_a_column_of_few_values_the_duration_is_no_pin(tmp_path: Path, header: str) -> None:
    logs = write_log(tmp_path / "logs", header, without=("App", "app"))
    found, _, _ = accepted(logs, tmp_path)
    assert found["pin_id"] == {"column": COLUMNS[header][1], "type": "string"}


def test_the_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    _, output, _ = accepted(write_log(tmp_path / "logs", GERMAN), tmp_path)
    expected = (
        "not read: lfd (9,000 integers), Bereich (4 texts: Liste, Profil, Start, Suche), Dauer_ms (229 integers), "
        "App (3 texts: Android, Web, iOS)"
    )
    assert f"  note       {expected}\n" in output
    text = (tmp_path / "site.yaml").read_text().replace("\n#   ", " ")
    assert f"# Note: {expected}" in text


def test_nothing_is_said_where_all_columns_are_read(tmp_path: Path) -> None:
    lines = [f"{row.user};{row.pin};{row.at:%Y-%m-%dT%H:%M:%SZ}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user;item;ts", *lines])
    _, output, _ = accepted(tmp_path / "logs", tmp_path)
    assert "not read" not in output


def test_a_column_of_few_values_is_asked_for_where_it_is_all_that_is_left(tmp_path: Path) -> None:
    lines = [f"{row.user};{row.at:%Y-%m-%dT%H:%M:%SZ};{['Android', 'iOS', 'Web'][row.number % 3]}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user;ts;app", *lines])
    _, output, _ = accepted(tmp_path / "logs", tmp_path)
    assert "unsure     Which column is the pin? app: 3 texts" in output


def test_the_things_of_a_table_are_pins_whatever_their_name(tmp_path: Path) -> None:
    """Both columns say nothing by their names; a table of the members does not make these pins."""
    lines = [f"m{row.user};x{row.pin};{row.at:%Y-%m-%dT%H:%M:%SZ}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["a;b;ts", *lines])
    write_lines(tmp_path / "logs" / "members.csv", ["a;age", *(f"m{user};{user % 50}" for user in range(200))])
    write_lines(tmp_path / "logs" / "stuff.csv", ["code;kind", *(f"x{pin};k{pin % 5}" for pin in range(900))])
    found, output, _ = accepted(tmp_path / "logs", tmp_path)
    assert (found["user_id"]["column"], found["pin_id"]["column"]) == ("a", "b")
    assert "its values are those of column code of stuff.csv, which has each once" in output


def test_a_table_of_artists_does_not_make_them_the_pins(tmp_path: Path) -> None:
    """Each track has one artist: the track is the pin, although only the artists have a table."""
    lines = [f"{row.user};t{row.pin};artist {row.pin % 90};{row.at:%Y-%m-%dT%H:%M:%SZ}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user;track;artist;ts", *lines])
    write_lines(tmp_path / "logs" / "artists.csv", ["artist;country", *(f"artist {each};SE" for each in range(90))])
    found, _, _ = accepted(tmp_path / "logs", tmp_path)
    assert found["pin_id"]["column"] == "track"


def test_integers_with_negative_ones_are_no_ids(tmp_path: Path) -> None:
    """`rest` has 400 values, 6 times as many as the pins, but -1 is one of them."""
    lines = [f"{row.user};x{row.pin % 64};{row.at:%Y-%m-%dT%H:%M:%SZ};{row.number * 7 % 400 - 1}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user;b;ts;rest", *lines])
    found, _, _ = accepted(tmp_path / "logs", tmp_path)
    assert found["pin_id"]["column"] == "b"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("strong", "gekauft gemerkt in_den_Warenkorb comprado compra carrito acheté"),
        ("use", "gehört gesehen geöffnet visto vista écouté vu"),
        ("against", "übersprungen entfernt gelöscht eliminado supprimé aus_Warenkorb_entfernt"),
        ("shown", "angezeigt"),
    ],
)
def test_kinds_of_actions_in_other_languages(kind: str, values: str) -> None:
    assert {value: kind_of(value) for value in values.split()} == dict.fromkeys(values.split(), kind)
