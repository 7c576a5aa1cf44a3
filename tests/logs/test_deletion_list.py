"""The deletion list: ids of the log's type, sorted and distinct; a mistake in the file is named with its line."""

from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import parse_user_id, read_deletion_list
from tests.support.sites import SmallSite


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


def test_a_list_that_the_site_file_names_must_exist(tmp_path: Path) -> None:
    site = listing(tmp_path, b"")
    (tmp_path / "forget.txt").unlink()
    with pytest.raises(PipelineError, match=r"no file at .*forget\.txt; create an empty one"):
        read_deletion_list(site.site)


def test_a_list_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"forget\.txt is not UTF-8 text"):
        read_deletion_list(listing(tmp_path, b"\xff\xfe1").site)


@pytest.mark.parametrize("text", ["bob", "1.0", "1e3", "", "9223372036854775808", "٣"])
def test_text_that_is_not_an_integer_id(text: str) -> None:
    with pytest.raises(PipelineError, match="is not an integer user id"):
        parse_user_id(text, "int")
    assert parse_user_id(text, "string") == text


def test_the_largest_integer_id() -> None:
    assert parse_user_id("9223372036854775807", "int") == 2**63 - 1
