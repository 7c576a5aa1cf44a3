"""The worked examples of docs/your-own-logs.md: the logs are written, the commands run, and every line compared."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app
from tests.support.documents import REPOSITORY
from tests.support.foreign_logs import LOGS

PAGE = (REPOSITORY / "docs" / "your-own-logs.md").read_text()
STORIES = {
    "shop": "A shop's daily CSVs",
    "events": "Events in Parquet",
    "ratings": "Ratings separated by `::`",
}
DATA = "/data"
"""Folder of the logs on the page."""


class Block(NamedTuple):
    language: str
    lines: list[str]


def blocks_of(title: str) -> list[Block]:
    """The blocks of a section of the page, in reading order."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [Block(language, text.splitlines()) for language, text in found]


def compare(documented: Sequence[str], actual: Sequence[str]) -> None:
    """The documented lines stand in the output, in their order; one that ends with … is the beginning of one."""
    place = 0
    for line in documented:
        beginning = line.removesuffix("…") if line.endswith("…") else None
        matches = [
            number
            for number in range(place, len(actual))
            if (actual[number] == line if beginning is None else actual[number].startswith(beginning))
        ]
        assert matches, f"{line!r} is not in\n" + "\n".join(actual[place:])
        place = matches[0] + 1


@pytest.mark.parametrize("name", STORIES)
def test_a_story_is_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PF_SITE", raising=False)
    LOGS[name](tmp_path / name)
    site = tmp_path / "mysite"
    site.mkdir()
    monkeypatch.chdir(site)
    texts = [file.read_text() for file in (tmp_path / name).iterdir() if file.suffix != ".parquet"]
    log = "".join(texts).splitlines()
    printed: list[str] = []
    blocks = blocks_of(STORIES[name])
    assert [block.language for block in blocks].count("sh") > 0
    for block in blocks:
        match block.language:
            case "csv":
                compare(block.lines, log)
            case "sh":
                (command,) = block.lines
                arguments = shlex.split(command.replace(DATA, str(tmp_path)))[1:]
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, f"{result.output}{result.exception}"
                printed = result.output.replace(str(tmp_path), DATA).splitlines()
            case "text":
                compare(block.lines, printed)
            case "yaml":
                compare(block.lines, (site / "site.yaml").read_text().splitlines())
            case other:
                raise AssertionError(other)


def test_every_story_has_a_section() -> None:
    assert [title for title in STORIES.values() if f"\n## {title}\n" not in PAGE] == []
