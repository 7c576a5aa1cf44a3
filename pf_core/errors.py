"""The pipeline's error: what is wrong, and which command or change repairs it."""

import json
from collections.abc import Mapping
from typing import Any

from pf_core.printable import printable

MAX_CHARS = 10_000
"""Largest length of what a message says; a message may quote a log, and a log may have a line of any length."""


class PipelineError(ValueError):
    """A mistake that the user of the pipeline can fix.

    `what` names the mistake and its place. `remedy`, if there is one, is what to do about it, mostly a command;
    the message is then "what; remedy". Control characters in `what` are shown as escapes: it may quote a log.
    """

    def __init__(self, what: str, remedy: str | None = None) -> None:
        what = printable(what, max_chars=MAX_CHARS, keep="\n\t")
        super().__init__(what if remedy is None else f"{what}; {remedy}")
        self.what, self.remedy = what, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.remedy)


def materialize_command(
    assets: str, ds: str | None = None, *, until: str | None = None, config: Mapping[str, Any] | None = None
) -> str:
    """The command that makes an asset, one of its partitions, or the range of partitions from `ds` to `until`.

    `config` is the run configuration of the first of the assets.
    """
    partition = "" if ds is None else f" --partition {ds}"
    if until is not None and until != ds:
        partition = f" --partition-range {ds}...{until}"
    given = ""
    if config is not None:
        given = f" --config-json '{json.dumps({'ops': {assets.split(',')[0]: {'config': dict(config)}}})}'"
    return f"dagster asset materialize --select {assets}{partition}{given} -m pf_assets.definitions"
