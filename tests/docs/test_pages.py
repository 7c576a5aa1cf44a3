"""README and docs are true: pages made from code are current, and what they name exists."""

import re
import shlex
import subprocess
import sys

import pytest

from pf_core.config.reference import keys_without_meaning, site_file_reference
from tests.support.documents import PAGES, REPOSITORY, blocks

TEXT = {str(page.relative_to(REPOSITORY)): page.read_text() for page in PAGES}
EVERYTHING = "\n".join(TEXT.values())

BY_THE_DEMO = "dagster_home/demo.yaml"
"""What `make demo` writes in a clone."""


def test_the_site_files_page_is_current() -> None:
    assert (REPOSITORY / "docs/site-file.md").read_text() == site_file_reference(), "run: make docs"


def test_every_key_of_a_site_file_has_a_meaning() -> None:
    assert keys_without_meaning() == []


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 150


def test_every_command_is_documented() -> None:
    result = subprocess.run([sys.executable, "-m", "pf_assets.cli.main", "--help"], capture_output=True, text=True)
    known = set(re.findall(r"^[│| ]*([a-z]+(?:-[a-z]+)*)  +[A-Z]", result.stdout, re.MULTILINE))
    assert {"demo", "recommend", "repair", "forget"} <= known
    assert [name for name in sorted(known) if not re.search(rf"\bpf {name}\b", EVERYTHING)] == []


def test_documented_commands_exist() -> None:
    result = subprocess.run([sys.executable, "-m", "pf_assets.cli.main", "--help"], capture_output=True, text=True)
    mentioned = set(re.findall(r"(?:`|^)pf ([a-z]+)", EVERYTHING, re.MULTILINE))
    assert [name for name in sorted(mentioned) if not re.search(rf"\b{name}\b", result.stdout)] == []


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", EVERYTHING, re.MULTILINE))
    assert {"demo", "test", "dev", "bench"} <= targets
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", TEXT)
def test_links_and_files_exist(page: str) -> None:
    folder = (REPOSITORY / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)", TEXT[page]) if "://" not in link]
    pictures = re.findall(r'src="([^"]+)"', TEXT[page])
    assert [link for link in links + pictures if not (folder / link).exists()] == []
    named = re.findall(r"`((?:pf_core|pf_assets|docs|dagster_home|benchmarks|tests)/[\w./-]+)`", TEXT[page])
    assert [name for name in named if name != BY_THE_DEMO and not (REPOSITORY / name).exists()] == []


def test_blocks_say_what_they_are() -> None:
    assert len(blocks("sh")) > 10
    unknown = [block for language in ("bash", "shell", "console") for block in blocks(language)]
    assert unknown == []
    for block in blocks("sh"):
        for command in block.commands:
            assert shlex.split(command), f"{block.page}: {command}"
