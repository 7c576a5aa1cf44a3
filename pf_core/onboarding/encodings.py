"""Whether text that is not UTF-8 is cp1252, as shops of Western Europe export it; Latin-1 is read as cp1252, too.

No byte proves it. What speaks against it are characters as Western words do not have them: several in a row that are
not ASCII (Cyrillic, Greek, Japanese), a capital or a sign within a word (encodings of Mac and DOS).
"""

import re
from collections.abc import Iterable, Iterator

from pf_core.config.files import Files
from pf_core.logs.sample import Plan, raw_lines

MOSTLY = 0.9
"""Share of the lines with other bytes than ASCII that must not be UTF-8: a file of both is neither."""

MOST_ODD = 0.05
"""Share of the characters that may be odd."""

MAX_EXAMPLES = 3

MAX_CHARS = 1 << 20
"""Characters that are looked at."""

_ODD = re.compile(
    "[^\0-\x7f]{3,}|[\ufffdƒ]|(?<=[a-z])[À-ÖØ-ÞŠŒŽŸ]"  # in a row; not in cp1252, or in no word; a capital
    "|(?<=[a-z])[¤¦§¨¬¯°±²³¶¹¼½¾¿÷‚„…†‡ˆ‰‹“”•˜›](?=[a-z])"
)

_EXAMPLE = re.compile(r"[\w .'&%-]{0,15}[^\0-\x7f][\w .'&%-]{0,15}")


def cp1252_evidence(lines: Iterable[bytes]) -> str | None:
    """Return why the lines are cp1252; None if they are UTF-8, or look like another encoding."""
    beyond_ascii = [line for line in lines if not line.isascii()]
    strange = [line for line in beyond_ascii if not _is_utf8(line)]
    if not strange or len(strange) < MOSTLY * len(beyond_ascii):
        return None
    raw = b"\n".join(strange)[:MAX_CHARS]
    text = raw.decode("cp1252", "replace")
    num_odd, num_other = (sum(map(len, re.findall(pattern, text))) for pattern in (_ODD, "[^\0-\x7f]"))
    if num_odd > MOST_ODD * num_other:
        return None
    examples = dict.fromkeys(found.strip() for found in _EXAMPLE.findall(text[:10_000]))
    shown = ", ".join(map(repr, list(examples)[:MAX_EXAMPLES]))
    also = "" if re.search(rb"[\x80-\x9f]", raw) else "; Latin-1 has the same characters here"
    are = "1 line that was read is" if len(strange) == 1 else f"{len(strange):,} lines that were read are"
    return f"{are} not UTF-8, and as cp1252 they say {shown}{also}"


def lines_in_utf8(source: Files, plan: Plan) -> Iterator[str]:
    """Yield a sentence if text that the site file says is in another encoding has lines in UTF-8.

    Nothing is rejected then, as `é` becomes `Ã©`. Text in another encoding is hardly ever valid UTF-8 by chance.
    """
    if source.encoding == "utf-8":
        return
    beyond_ascii = [line for piece in plan.pieces for line in raw_lines(piece) if not line.isascii()]
    num_utf8 = sum(map(_is_utf8, beyond_ascii))
    if num_utf8 > (1 - MOSTLY) * len(beyond_ascii):
        yield (
            f"{num_utf8:,} of {len(beyond_ascii):,} lines with characters beyond ASCII are UTF-8, and are misread as "
            f"{source.encoding}: delete `encoding` if all files are UTF-8, or write all in one encoding"
        )


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
        return True
    except UnicodeDecodeError:
        return False
