"""The page with the tables of all logs: each log has a section between two comments, which a benchmark replaces."""

from pathlib import Path

from pf_core.errors import PipelineError
from pf_core.storage.files import write_text


def publish_section(page: Path, name: str, markdown: str) -> None:
    """Replace the section of this log; a log without a section gets one at the end of the page."""
    if not page.is_file():
        raise PipelineError(f"no page at {page}", "name an existing Markdown page, such as docs/quality.md")
    text, (begin, end) = page.read_text(encoding="utf-8"), markers(name)
    section = f"{begin}\n{markdown.strip()}\n{end}"
    num_begin, num_end = text.count(begin), text.count(end)
    if num_begin == num_end == 0:
        write_text(page, f"{text.rstrip()}\n\n{section}\n")
        return
    if num_begin != 1 or num_end != 1 or text.index(begin) > text.index(end):
        raise PipelineError(f"{page} must have the comments {begin} and {end} once, in this order", "fix the page")
    before, after = text[: text.index(begin)], text[text.index(end) + len(end) :]
    write_text(page, before + section + after)


def markers(name: str) -> tuple[str, str]:
    """Return the comments before and after the section of a log."""
    return f"<!-- benchmark {name} -->", f"<!-- end of benchmark {name} -->"
