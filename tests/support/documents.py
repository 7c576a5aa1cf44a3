"""The project's Markdown pages, and the blocks of commands and code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `reason` says why the tests do not run it."""

    page: str
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[str]:
        """The lines of a block of shell commands, without remarks."""
        lines = [re.sub(r"\s+#.*$", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(language: str) -> list[Block]:
    """Every block of a language on all pages, in reading order."""
    return [
        Block(str(page.relative_to(REPOSITORY)), match["language"], match["text"], match["reason"])
        for page in PAGES
        for match in _BLOCK.finditer(page.read_text())
        if match["language"] == language
    ]
