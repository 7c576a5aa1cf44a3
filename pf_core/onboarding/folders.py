"""The files of a log among those that are named: groups of files with the same columns, and a pattern for each group.

Files are first grouped by name, numbers aside, so that of thousands of hourly files only a few are opened.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pf_core.config.files import DAY
from pf_core.errors import PipelineError
from pf_core.logs.sample import evenly, size_text
from pf_core.onboarding.layout import Layout, layout_of

MAX_FILES = 100_000

OPENED_OF_A_NAME = 5
"""Files of the same name, numbers aside, that are opened to see whether they have the same columns."""

SHARED = 0.75
"""Files of other names are one table if they share more than this share of their columns."""

SHARED_IN_A_NAME = 0.5
"""Files of one name, numbers aside, may share fewer: logs get columns over the years."""

_NUMBERS = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{8,}(?![0-9A-Za-z])|\d+")
"""What numbers the files of one name: digits, and hexadecimal numbers such as the parts of a UUID."""

_DATE = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Files that can be read as one table."""

    layout: Layout
    files: list[Path]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def __str__(self) -> str:
        first = self.files[0]
        name = str(first) if len(self.files) == 1 else f"{len(self.files):,} files like {first}"
        return f"{name} ({size_text(self.num_bytes)})"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A folder, and a path with wildcards below it that names some files and no others."""

    root: Path
    path: str

    @property
    def is_dated(self) -> bool:
        return DAY in self.path


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Return the absolute paths of the files that are named, and of all files of the folders; not the hidden ones."""
    found: dict[Path, None] = {}
    for path in paths:
        if ":/" in str(path):  # Path makes one slash of two
            raise PipelineError(
                f"{str(path).replace(':/', '://', 1)} is in object storage, and pf init reads files on this machine",
                "copy some of the files into a folder, and set source.root in the site file afterwards",
            )
        try:
            if path.is_dir():
                found.update(dict.fromkeys(_files_below(path.resolve())))
            elif path.exists():
                found[path.resolve()] = None
            else:
                raise PipelineError(f"there is no {path}", "name the log files, or the folder that they are in")
        except PermissionError as error:
            raise PipelineError(
                f"{error.filename or path} cannot be read: {error.strerror}", "let the user who runs pf read it"
            ) from error
        if len(found) > MAX_FILES:
            raise PipelineError(f"{path} has more than {MAX_FILES:,} files", "name the folder of the log itself")
    if not found:
        raise PipelineError(f"{', '.join(map(str, paths))}: no file there", "name the log files, or their folder")
    return sorted(found)


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith((".", "_")))


def group_files(files: Sequence[Path]) -> tuple[list[Group], list[PipelineError]]:
    """Return groups of files with the same columns, the largest first, and why files belong to none."""
    by_name: dict[str, list[Path]] = {}
    for file in files:
        by_name.setdefault(_NUMBERS.sub("#", str(file)), []).append(file)
    groups: list[Group] = []
    refused: list[PipelineError] = []
    for named in by_name.values():
        found, problems = _groups_of_a_name(named)
        refused += problems
        for group in found:
            _add(groups, group)
    return sorted(groups, key=lambda group: -group.num_bytes), refused


def _groups_of_a_name(files: list[Path]) -> tuple[list[Group], list[PipelineError]]:
    """Open a few of the files; if these have not the same columns, open all of them."""
    found, refused = _opened(evenly(files, OPENED_OF_A_NAME))
    if len(found) == 1 and not refused:
        return [Group(layout=found[0].layout, files=files)], []
    return (found, refused) if len(files) <= OPENED_OF_A_NAME else _opened(files)


def _opened(files: Sequence[Path]) -> tuple[list[Group], list[PipelineError]]:
    groups: list[Group] = []
    refused: list[PipelineError] = []
    for file in files:
        try:
            _add(groups, Group(layout=layout_of(file), files=[file]), least_shared=SHARED_IN_A_NAME)
        except PipelineError as error:
            refused.append(error)
    return groups, refused


def _add(groups: list[Group], group: Group, *, least_shared: float = SHARED) -> None:
    """Add a group to the one with the same columns, if there is one."""
    for index, known in enumerate(groups):
        if known.layout.is_like(group.layout, least_shared=least_shared):
            layout = known.layout.joined(group.layout)
            groups[index] = Group(layout=layout, files=sorted({*known.files, *group.files}))
            return
    groups.append(group)


def pattern_of(group: Group, others: Sequence[Group]) -> Pattern:
    """Return a pattern for the files of a group; refuse a group whose files no pattern separates from the others."""
    files = group.files
    root = Path(os.path.commonpath({file.parent for file in files}))
    paths = [file.relative_to(root).parts for file in files]
    strange = {file for other in others for file in other.files}
    for path in _patterns(paths):
        matched = {Path(name) for name in glob.glob(str(Path(glob.escape(str(root))) / path), recursive=True)}
        if matched >= set(files) and not matched & strange:
            return Pattern(root=root, path=path)
    raise PipelineError(
        f"no pattern names the {len(files):,} files like {files[0]} and none of the others in {root}",
        "move the files of the log into a folder of their own",
    )


def _patterns(paths: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield patterns that match the paths, the narrowest first."""
    if len(set(paths)) == 1:
        yield "/".join(map(glob.escape, paths[0]))
        return
    if len({len(parts) for parts in paths}) == 1:
        yield "/".join(_narrow(names) for names in zip(*paths, strict=True))
    names = [parts[-1] for parts in paths]
    deep = "**/" if any(len(parts) > 1 for parts in paths) else ""
    yield f"{deep}{_narrow(names)}"
    end = glob.escape(_common_end(names))
    yield f"{deep}*{end}"
    if all(name[0] in "0123456789" for name in names):  # 2024-03-01.csv beside titles.csv
        yield f"{deep}[0-9]*{end}"


def _narrow(names: Sequence[str]) -> str:
    """Return what the names have in common, with a star for the rest; cut numbers and words belong to the rest."""
    if len(set(names)) == 1:
        return glob.escape(names[0])
    start = _common_start(names)
    if any(name[len(start) : len(start) + 1].isalpha() for name in names):
        start = re.sub(r"[A-Za-z]+$", "", start)
    start = re.sub(r"[0-9][0-9_.:T-]*$", "", start)
    rest = [name[len(start) :] for name in names]
    end = _common_end(rest)
    if any(name[: len(name) - len(end)][-1:].isalpha() for name in rest):
        end = re.sub(r"^[A-Za-z]+", "", end)
    end = re.sub(r"^[0-9_:T-]*[0-9]", "", end)
    return f"{glob.escape(start)}*{glob.escape(end)}"


def _common_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = next((place for place, char in enumerate(first) if last[place : place + 1] != char), len(first))
    return first[:same]


def _common_end(names: Sequence[str]) -> str:
    return _common_start([name[::-1] for name in names])[::-1]


def dated_pattern(group: Group, pattern: Pattern) -> tuple[Pattern, dict[Path, str]] | None:
    """Return the pattern with {ds} for the day in every file's path, and the day of each file; None if some have none.

    The files of a day may have several names; every path must name one day, always at the same place.
    """
    paths = {file: file.relative_to(pattern.root).as_posix() for file in group.files}
    days = {file: _DATE.findall(path) for file, path in paths.items()}
    if any(len(set(found)) != 1 for found in days.values()):
        return None
    kept = {path.replace(days[file][0], "\0") for file, path in paths.items()}
    narrow = next(_patterns([tuple(path.split("/")) for path in kept]))
    if "\0" not in narrow:
        return None
    return Pattern(root=pattern.root, path=narrow.replace("\0", DAY)), {file: found[0] for file, found in days.items()}
