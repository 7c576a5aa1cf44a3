"""`pf init`: looks at logs and writes a site file for them, and a dagster.yaml beside it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import fail, show
from pf_assets.settings import INSTANCE_FILE, INSTANCE_TEXT, SITE_FILE
from pf_core.errors import PipelineError
from pf_core.onboarding.draft import Draft, draft_site
from pf_core.onboarding.questions import Question
from pf_core.onboarding.site_text import site_text
from pf_core.onboarding.trial import tried
from pf_core.storage.files import write_new_text
from pf_core.storage.privacy import private


def init(
    logs: Annotated[list[Path], typer.Argument(help="log files, or the folder that they are in")],
    catalogue: Annotated[Path | None, typer.Option(help="files with one row for each pin")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing: take the best guess, and say so")] = False,
    out: Annotated[Path, typer.Option(help="folder to write to")] = Path(),
) -> None:
    """Look at logs, and write ./site.yaml and ./dagster.yaml for them; nothing that exists is overwritten."""
    target = out / SITE_FILE
    if target.exists():
        fail(f"{target} exists, and pf init overwrites nothing; delete it, or give another folder with --out")
    is_asking = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    draft = draft_site(logs, catalogue, ask if is_asking else lambda question: question.default)
    try:
        draft = tried(draft)
    except PipelineError:
        _print_draft(draft)  # what was guessed may be why
        raise
    text = site_text(draft, out)
    _print_draft(draft)
    if draft.notes.unsure and not (yes or is_asking):
        fail("the log leaves this open; run it again with --yes to take the guesses, or on a terminal to be asked")
    _write(out, text)
    show(f"wrote {target} and {out / INSTANCE_FILE}")
    show(f"next: pf check {target}")


def ask(question: Question) -> str:
    """Ask a person; an answer that is no option is asked for again."""
    show(f"  ({question.evidence})")
    choice = typer.prompt(
        question.text + (f" [{', '.join(question.options)}]" if question.options else ""), default=question.default
    ).strip()
    if not question.is_possible(choice):
        show(f"  {choice!r} is no possible answer")
        return ask(question)
    return str(choice)


def _print_draft(draft: Draft) -> None:
    show(f"read {draft.plan}; about {draft.num_rows:,} rows")
    actions = draft.actions
    show(f"  log        {draft.root / actions['path']}")
    for label, key in (("user", "user_id"), ("pin", "pin_id"), ("time", "ts"), ("action", "action_type")):
        show(f"  {label:<10} {_named(actions[key])}: {draft.notes.guessed[key]}")
    for label, key in (("surface", "surface"), ("duration", "duration_s"), ("encoding", "encoding")):
        if key in actions:
            show(f"  {label:<10} {_named(actions[key])}: {draft.notes.guessed[key]}")
    days = draft.days
    show(f"  days       {days.start_ds} ({days.start_reason}) to {days.end_ds} ({days.end_reason})")
    if draft.pins:
        show(f"  catalogue  {draft.notes.guessed['catalogue']}")
    for hint in draft.notes.hints:
        show(f"  note       {hint}")
    for sentence in draft.left_out[:5]:
        show(f"  left out   {sentence}")
    if len(draft.left_out) > 5:
        show(f"  left out   {len(draft.left_out) - 5:,} more")
    for decision in draft.notes.unsure:
        show(f"  unsure     {decision}")


def _named(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "rules" in value:
        return "by rules"
    return str(value.get("column", value.get("constant")))


def _write(folder: Path, text: str) -> None:
    """Write both files, the site file last: a folder with one is complete. A dagster.yaml that is there stays.

    They are private, as the state is: the site file quotes the log.
    """
    try:
        with private(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / INSTANCE_FILE).exists():
                write_new_text(folder / INSTANCE_FILE, INSTANCE_TEXT.read_text())
            write_new_text(folder / SITE_FILE, text)
    except OSError as error:
        raise PipelineError(
            f"{folder} cannot be written to: {error.strerror}", "name another folder with --out"
        ) from error
