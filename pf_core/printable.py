"""Text of other people's logs, made safe to show on a terminal or a page."""


def printable(text: str, *, max_chars: int | None = None, keep: str = "") -> str:
    r"""Return the text with every character that cannot be seen as its Python escape: ESC is shown as \x1b.

    These are the control characters, which a terminal executes, and those that reorder text or take no space.
    Characters in `keep` stay as they are. A text of more than `max_chars` characters is cut and ends with "…".
    Applying the function to its own result changes nothing.
    """
    if max_chars is not None:
        text = text[: max_chars + 1]  # before the escapes: the text may have millions of characters
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)
    if max_chars is not None and len(text) > max_chars:
        text = text[: max_chars - 1] + "…"
    return text


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
