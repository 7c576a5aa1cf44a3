"""Draw what a terminal shows as an SVG picture: for docs/images.

tmux new-session -s shot -x 100 -y 40 pf run
tmux capture-pane -t shot -e -p | python benchmarks/terminal_picture.py docs/images/run.svg --title "pf run"
"""

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Fonts from the web: a page of documentation loads nothing from elsewhere."""


def draw(ansi: str, *, title: str, width: int) -> str:
    """Return the SVG of a screen with its colours; empty lines at its ends are left out."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(ansi.strip("\n")), soft_wrap=True)
    picture = console.export_svg(title=title, unique_id="terminal")
    return FONT.sub("", picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="pf")
    parser.add_argument("--width", type=int, default=100)
    arguments = parser.parse_args()
    arguments.out.write_text(draw(sys.stdin.read(), title=arguments.title, width=arguments.width))


if __name__ == "__main__":
    main()
