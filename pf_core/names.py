"""Words of a site, such as its action types, in names: of metrics, partitions and folders.

A log may have any text there; MLflow, Dagster and file systems accept only some. Different words have different names,
and words of letters, digits, spaces, `_`, `-` and single dots are names as they are.
"""

import hashlib
import re

MAX_NAME_BYTES = 200
"""Length of a name in UTF-8; a longer one is cut. A file name may have 255 bytes, a name in MLflow 250 characters."""

EMPTY = "::"

_ESCAPED = re.compile(r"[^\w.\- ]|\.(?=\.)|^\.")
"""Characters that are not accepted, and dots that mean another folder, or a range of partitions."""


def name_of(word: str) -> str:
    """Return the name of a word: `save:2b:` of `save+`, in which the number is that of the character."""
    return _cut(_escaped(word), word)


def path_name_of(path: str) -> str:
    """Return the name of words that `/` separates: a path of their names, as long as one name at most."""
    return _cut("/".join(map(_escaped, path.split("/"))), path)


def _escaped(word: str) -> str:
    return _ESCAPED.sub(lambda found: f":{ord(found[0]):x}:", word) or EMPTY


def _cut(name: str, word: str) -> str:
    """Return the name; of one that is too long the beginning and a digest, which no escaped character looks like."""
    encoded = name.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return name
    digest = f":{hashlib.blake2b(word.encode(), digest_size=16).hexdigest()}:"
    return encoded[: MAX_NAME_BYTES - len(digest)].decode(errors="ignore") + digest
