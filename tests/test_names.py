"""Names of words: accepted by MLflow, Dagster and the file system, and different for different words."""

import posixpath
import re
from pathlib import Path

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from pf_core.names import MAX_NAME_BYTES, name_of, path_name_of

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)

AWKWARD = [
    "",
    ".",
    "..",
    "...",
    ". .",
    "/",
    "a/b",
    "../a",
    "save+",
    "a:2b:",
    ":",
    "::",
    "a\nb",
    "\x00",
    "é" * 200,
    "|,[]",
]


def decoded(name: str) -> str:
    """What a name that was not cut stands for."""
    return "" if name == "::" else re.sub(":([0-9a-f]+):", lambda found: chr(int(found[1], 16)), name)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("repin", "repin"),
        ("long press-2_x v1.5", "long press-2_x v1.5"),
        ("保存", "保存"),
        ("save+", "save:2b:"),
        ("a/b", "a:2f:b"),
        ("a\nb", "a:a:b"),
        ("..", ":2e:."),
        ("", "::"),
    ],
)
def test_names_are_readable(word: str, name: str) -> None:
    assert name_of(word) == name


@given(word=WORDS)
@pytest.mark.parametrize("prefix", ["", "only_"])
def test_a_name_is_accepted_everywhere_and_says_which_word_it_is(prefix: str, word: str) -> None:
    name = name_of(word)
    assert len(name.encode()) <= MAX_NAME_BYTES
    assert Path("folder", name).parent == Path("folder")
    assert posixpath.normpath(f"a/{name}") == f"a/{name}"
    assert dg.StaticPartitionsDefinition([prefix + name]).get_partition_keys() == [prefix + name]
    _validate_metric_name(f"once/recall_at_10/{name}")  # type: ignore[no-untyped-call]
    if len(name.encode()) < MAX_NAME_BYTES - 4:  # it was not cut
        assert decoded(name) == word


@given(word=st.one_of(WORDS, st.sampled_from(AWKWARD)), frequency=st.sampled_from(["", "_once"]))
@example(word="x" * 10_000, frequency="_once")
@example(word="/" * 300, frequency="")
def test_a_metric_of_any_word_has_a_name_that_mlflow_accepts(word: str, frequency: str) -> None:
    _validate_metric_name(path_name_of(f"evaluation_recall_at_10/{word}{frequency}"))  # type: ignore[no-untyped-call]


@given(words=st.sets(st.one_of(WORDS, st.sampled_from(AWKWARD)), min_size=2))
def test_different_words_have_different_names(words: set[str]) -> None:
    assert len({name_of(word) for word in words}) == len(words)
    assert len({path_name_of(f"once/recall_at_10/{word}") for word in words}) == len(words)


def test_long_words_that_begin_alike_differ() -> None:
    first, second = ("x" * 10_000 + end for end in "ab")
    assert name_of(first) != name_of(second)
    assert name_of(first).startswith("x" * 100)
