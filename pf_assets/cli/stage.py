"""A stage of the pipeline while it is shown: how far it is, what it said last, and how long it took."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pf_assets.cli.run_log import Amount

SHOWN_LINES = 20
"""Number of lines of a failed stage's log that are printed."""

RATE_AFTER_S = 1.0
"""Time after which the amounts of a stage tell a rate."""

State = Literal["waiting", "running", "done", "failed", "interrupted"]


@dataclass
class Stage:
    """One row."""

    name: str
    state: State = "waiting"
    seconds: float = 0.0
    """Of the times before the current one."""
    started: float = 0.0
    amount: Amount | None = None
    first: tuple[int, float] | None = None
    """The first amount of the current unit, and when it was reached: rates are counted from there."""
    text: str = ""
    """The last message, or the result."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_LINES))
    open_steps: set[str] = field(default_factory=set)
    """Steps at work: that of the asset, or those of its checks, which may come after the steps of other assets."""
    is_told: bool = False
    """Whether its line was printed since its asset began."""

    def elapsed(self) -> float:
        return self.seconds + (time.monotonic() - self.started if self.state == "running" else 0.0)

    def share(self) -> float | None:
        """How much of the stage is done; None if it does not say."""
        return None if self.amount is None else self.amount.done / self.amount.total

    def rate(self) -> float | None:
        """Units in a second; None before there are two amounts."""
        if self.amount is None or self.first is None:
            return None
        done, since = self.amount.done - self.first[0], time.monotonic() - self.first[1]
        return done / since if done > 0 and since > RATE_AFTER_S else None

    def units_left_s(self) -> float | None:
        """Seconds until its amount is complete at this rate; None without a rate."""
        rate = self.rate()
        return None if rate is None or self.amount is None else (self.amount.total - self.amount.done) / rate
