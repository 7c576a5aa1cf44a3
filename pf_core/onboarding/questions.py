"""Questions about a log that it does not answer itself, and the notes on what was decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Question:
    """A decision that the log leaves open."""

    text: str
    evidence: str
    """What the log shows."""
    options: Sequence[str] = ()
    """Possible answers; empty: free text."""
    default: str
    """The best guess."""
    accepts: Callable[[str], bool] = lambda answer: True
    """Whether an answer is possible, where there are no options."""

    def is_possible(self, answer: str) -> bool:
        """Whether this can be an answer."""
        return answer in self.options if self.options else self.accepts(answer)


Decide = Callable[[Question], str]
"""Returns the answer to a question: a person's, or the default."""


@dataclass
class Notes:
    """What was decided, with evidence, for the comments of the site file and for the terminal."""

    decide: Decide
    guessed: dict[str, str] = field(default_factory=dict)
    """Evidence by key of the site file."""
    hints: list[str] = field(default_factory=list)
    """What a reader of the site file should know."""
    unsure: list[str] = field(default_factory=list)
    """Decisions that the log leaves open: the question, the decision, the evidence."""

    def ask(self, question: Question) -> str:
        """Return the answer to a question, and note it as unsure."""
        answer = self.decide(question)
        is_own = answer != question.default
        self.unsure.append(f"{question.text} {answer}{' (your answer)' if is_own else ''}: {question.evidence}")
        return answer


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 day, 2 days."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float) -> str:
    """Return a share as a percentage that is not rounded to 0 or 100."""
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.3g} %" if share < 0.995 or share == 1 else f"{100 * share:.1f} %"
