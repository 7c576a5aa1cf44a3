"""The deletion list: every id is itself, a line that may mean another user is named, and no request is lost."""

import fcntl
import json
import os
import resource
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.errors import PipelineError
from pf_core.logs import deletion_list
from pf_core.logs.deletion_list import add_to_deletion_list, find_entry, parse_user_id, read_deletion_list
from tests.support.sites import SmallSite

SMALLEST, LARGEST = -(2**63), 2**63 - 1

STRANGE_IDS = [
    *(" alice", "alice ", "\talice", "al\nice", "al\r\nice", "al\x0bice", "al\u2028ice", "al\x85ice", "al\x1cice"),
    *("\ufeffalice", '"alice"', '{"user_id": "alice"}', "\\", "\x1b[2J", "\0", " ", "\u00e9", "e\u0301", "\u200b"),
    *("-1", "--verify", "007", "7", "7.0", "null", "x" * 10_000, "ALICE", "\U0001f600", "'", "\u202ealice"),
]


def listing(root: Path, content: bytes, id_type: str = "int") -> SmallSite:
    site = SmallSite(root, {"id_type": id_type})
    (root / "forget.txt").write_bytes(content)
    return site


def test_integer_ids_are_sorted_and_distinct(tmp_path: Path) -> None:
    site = listing(tmp_path, b"12\n\n -5 \n12\r\n007\n")
    assert read_deletion_list(site.site).to_pylist() == [-5, 7, 12]


def test_string_ids_are_kept_as_they_are(tmp_path: Path) -> None:
    site = listing(tmp_path, "bob\n007\nÜ\n".encode(), "string")
    assert read_deletion_list(site.site).to_pylist() == ["007", "bob", "Ü"]


def test_a_site_without_a_list_forgets_nobody(tmp_path: Path) -> None:
    site = SmallSite(tmp_path).site.model_copy(update={"deletion_list": None})
    ids = read_deletion_list(site)
    assert (len(ids), str(ids.type)) == (0, "int64")
    with pytest.raises(PipelineError, match="names no deletion_list; add `deletion_list"):
        add_to_deletion_list(site, [1])


def test_a_list_that_the_site_file_names_must_exist(tmp_path: Path) -> None:
    site = listing(tmp_path, b"")
    (tmp_path / "forget.txt").unlink()
    with pytest.raises(PipelineError, match=r"no file at .*forget\.txt; create an empty one"):
        read_deletion_list(site.site)


def test_a_list_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"forget\.txt is not UTF-8 text"):
        read_deletion_list(listing(tmp_path, b"\xff\xfe1").site)


# Ids


@pytest.mark.parametrize("text", ["bob", "1.0", "1e3", "", "9223372036854775808", "-9223372036854775809", "٣", "1_0"])
def test_text_that_is_not_an_integer_id(text: str) -> None:
    with pytest.raises(PipelineError, match="is not an integer user id"):
        parse_user_id(text, "int")
    assert parse_user_id(text, "string") == text


def test_the_largest_and_the_smallest_integer_id(tmp_path: Path) -> None:
    assert parse_user_id("9223372036854775807", "int") == LARGEST
    assert parse_user_id("-9223372036854775808", "int") == SMALLEST
    assert parse_user_id("0" * 5000 + "7", "int") == 7
    site = listing(tmp_path, b"-9223372036854775808\n").site
    assert add_to_deletion_list(site, [LARGEST, SMALLEST]) == 1
    assert read_deletion_list(site).to_pylist() == [SMALLEST, LARGEST]


def test_bytes_that_are_no_text_are_no_id() -> None:
    with pytest.raises(PipelineError, match="is not UTF-8 text"):
        parse_user_id(os.fsdecode(b"caf\xe9"), "string")


@pytest.mark.parametrize("user_id", STRANGE_IDS)
def test_a_strange_id_forgets_exactly_that_user(tmp_path: Path, user_id: str) -> None:
    site = listing(tmp_path, b"bob\n", "string").site
    assert add_to_deletion_list(site, [user_id]) == 1
    assert read_deletion_list(site).to_pylist() == sorted(["bob", user_id])
    assert add_to_deletion_list(site, [user_id, user_id]) == 0
    assert (tmp_path / "forget.txt").read_bytes().isascii()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True, max_size=20))
def test_every_text_is_itself(tmp_path_factory: pytest.TempPathFactory, user_ids: list[str]) -> None:
    site = listing(tmp_path_factory.mktemp("list"), b"\xef\xbb\xbf", "string").site
    assert add_to_deletion_list(site, user_ids) == len(user_ids)
    assert read_deletion_list(site).to_pylist() == sorted(user_ids)


@pytest.mark.parametrize(("user_id", "id_type"), [("", "string"), ("\ud800", "string")])
def test_an_id_that_no_log_has_is_not_added(tmp_path: Path, user_id: str, id_type: str) -> None:
    site = listing(tmp_path, b"bob\n", id_type).site
    with pytest.raises(PipelineError, match="has no user_id that is a text"):
        add_to_deletion_list(site, ["carol", user_id])
    assert (tmp_path / "forget.txt").read_bytes() == b"bob\n"


# Lines


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_the_byte_order_mark_is_no_part_of_the_first_id(tmp_path: Path, id_type: str) -> None:
    site = listing(tmp_path, b"\xef\xbb\xbf5\n6\n", id_type).site
    assert list(map(str, read_deletion_list(site).to_pylist())) == ["5", "6"]


def test_json_lines_and_plain_lines_may_be_mixed(tmp_path: Path) -> None:
    content = '{"user_id": " a"}\r\nbob\r\n\r\n{"since": "2026-01-01", "user_id": "b\\nc", "mine": [1, {}]}\n'
    content += '  {"user_id":"d"}  '
    site = listing(tmp_path, content.encode(), "string").site
    assert read_deletion_list(site).to_pylist() == [" a", "b\nc", "bob", "d"]
    entry = find_entry(site, "b\nc")
    assert entry is not None
    assert entry["since"] == "2026-01-01"
    assert find_entry(site, "b") is None


@pytest.mark.parametrize(
    "line",
    [
        *(" alice", "alice ", "\u00a0alice", "al\x0bice", "al\u2028ice", "al\x85ice", "alice\r", "\ufeffalice"),
        *('"alice"', '"alice', "a\tb", "\0\0\0", "  ", "al\x1bice", "al\u200bice"),
    ],
)
def test_a_plain_line_that_may_mean_two_users_is_refused(tmp_path: Path, line: str) -> None:
    content = f"bob\n{line}\n\n" if not line.endswith("\r") else f"bob\n{line}\r\n"
    with pytest.raises(PipelineError, match=r"forget\.txt, line 2: .* may mean more than one user") as refused:
        read_deletion_list(listing(tmp_path, content.encode(), "string").site)
    assert str(refused.value).isprintable()
    exact = str(refused.value.remedy).partition("in the logs: ")[2].rpartition(", or {")[0]
    (tmp_path / "forget.txt").write_text(f"bob\n{exact}\n")  # as the message says
    assert read_deletion_list(SmallSite(tmp_path, {"id_type": "string"}).site).to_pylist() == sorted(["bob", line])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"user_id": 5', "is cut off"),
        ('{"user_id": 5}}', "not a JSON object"),
        ('{"user_id": 5, "user_id": 6}', "a key appears twice"),
        ("{}", "no user_id that is an integer"),
        ('{"user_id": true}', "no user_id that is an integer"),
        ('{"user_id": "5"}', "no user_id that is an integer"),
        ('{"user_id": 5.0}', "no user_id that is an integer"),
        ('{"user_id": 9223372036854775808}', "no user_id that is an integer"),
        ('{"User_ID": 5}', "no user_id that is an integer"),
        ('{"user_id": ' + "[" * 100_000 + "}", "not a JSON object"),
        ('{"user_id": ' + "9" * 5000 + "}", "not a JSON object"),
        ("1\x0b2", "not an integer user id"),
        ("1,2", "not an integer user id"),
        ('"5"', "not an integer user id"),
    ],
)
def test_a_line_that_names_no_user_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    site = listing(tmp_path, f"1\n{line}".encode()).site
    with pytest.raises(PipelineError, match=rf"forget\.txt, line 2:? .*{expected}") as refused:
        read_deletion_list(site)
    assert len(str(refused.value)) < 700
    with pytest.raises(PipelineError, match="line 2"):
        add_to_deletion_list(site, [3])
    assert (tmp_path / "forget.txt").read_text() == f"1\n{line}"  # a request is not added to what nobody can read


def test_a_line_that_a_crash_cut_is_named(tmp_path: Path) -> None:
    site = listing(tmp_path, b"").site
    add_to_deletion_list(site, [12, 345])
    whole = (tmp_path / "forget.txt").read_bytes()
    second = whole.index(b"\n") + 1
    for length in range(second + 1, len(whole) - 1):
        (tmp_path / "forget.txt").write_bytes(whole[:length])
        with pytest.raises(PipelineError, match=r"line 2 is cut off: .* delete the line, then run `pf forget` again"):
            read_deletion_list(site)
    (tmp_path / "forget.txt").write_bytes(whole[:-1])  # only the end of the line is missing
    assert read_deletion_list(site).to_pylist() == [12, 345]


def test_a_line_without_an_end_is_not_continued(tmp_path: Path) -> None:
    site = listing(tmp_path, b"1\n23").site
    add_to_deletion_list(site, [4])
    assert read_deletion_list(site).to_pylist() == [1, 4, 23]


def test_a_file_of_one_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_list, "MAX_LINE_BYTES", 1000)
    with pytest.raises(PipelineError, match="line 2: longer than 1,000 bytes"):
        read_deletion_list(listing(tmp_path, b"5\n" + b"7" * 5000).site)


# Writers


def test_requests_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    site = listing(tmp_path, b"0\n").site
    together, added = threading.Barrier(8), []

    def request(first: int) -> None:
        together.wait()
        added.extend(add_to_deletion_list(site, [user, 1000]) for user in range(first, first + 20))

    writers = [threading.Thread(target=request, args=(100 * number,)) for number in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    expected = {0, 1000} | {user for number in range(1, 9) for user in range(100 * number, 100 * number + 20)}
    assert read_deletion_list(site).to_pylist() == sorted(expected)
    assert sum(added) == len(expected) - 1
    assert len((tmp_path / "forget.txt").read_text().splitlines()) == len(expected)  # nobody twice


def test_the_line_is_durable_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, synced = listing(tmp_path, b"").site, []

    def fsync(descriptor: int) -> None:
        synced.append(os.pread(descriptor, 1000, 0))

    monkeypatch.setattr(os, "fsync", fsync)
    add_to_deletion_list(site, [5])
    [content] = synced
    assert json.loads(content)["user_id"] == 5


def test_a_full_disk_leaves_the_list_as_it_was(tmp_path: Path) -> None:
    site = listing(tmp_path, b"1\n").site
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limit[1]))  # the beginning of a line fits
    try:
        with pytest.raises(PipelineError, match=r"forget\.txt cannot be written: .*nothing was added; make .* free"):
            add_to_deletion_list(site, [2, 3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "forget.txt").read_bytes() == b"1\n"


def test_a_writer_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = listing(tmp_path, b"1\n").site
    monkeypatch.setattr(deletion_list, "LOCK_WAIT_S", 0.0)
    with deletion_list._locked(tmp_path / "forget.txt"):
        with pytest.raises(PipelineError, match="another process has locked the deletion list"):
            add_to_deletion_list(site, [2])
    assert add_to_deletion_list(site, [2]) == 1


def test_a_list_that_an_editor_replaces_meanwhile_gets_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, path, flock = listing(tmp_path, b"1\n").site, tmp_path / "forget.txt", fcntl.flock
    replaced: list[Any] = []

    def replace_first(*arguments: Any) -> None:
        if not replaced:
            (tmp_path / "edited").write_text("1\n7\n")
            replaced.append((tmp_path / "edited").rename(path))
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    add_to_deletion_list(site, [2])
    assert read_deletion_list(site).to_pylist() == [1, 2, 7]


# Size


def test_memory_does_not_grow_with_the_objects_of_a_long_list(tmp_path: Path) -> None:
    peaks = []
    for num in (100_000, 300_000):
        since = "2026-01-01T00:00:00+00:00"
        lines = [f'{{"user_id": "user-{number}", "since": "{since}"}}\n' for number in range(num)]
        site = listing(tmp_path, "".join(lines).encode(), "string").site
        tracemalloc.start()
        assert len(read_deletion_list(site)) == num
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
