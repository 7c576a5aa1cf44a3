"""The site's deletion list: a text file with the id of one user a line who must be forgotten.

Every stage that stores users reads it: ingestion drops their rows, timelines, snapshot and releases drop the users, so
that they stay out although old logs still hold their actions.
"""

import re

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.schemas import IdType, id_arrow_type
from pf_core.storage.files import path_of


def parse_user_id(text: str, id_type: IdType) -> int | str:
    """Convert the text of a user id to the type that the logs use."""
    if id_type == "string":
        return text
    if not re.fullmatch("-?[0-9]{1,19}", text) or abs(int(text)) >= 2**63:
        raise PipelineError(f"{text!r} is not an integer user id")
    return int(text)


def read_deletion_list(site: Site) -> pa.Array:
    """Return the user ids on the deletion list, sorted and distinct; empty if the site has no list."""
    id_type = site.source.actions.user_id.type
    ids: set[int | str] = set()
    if site.deletion_list is not None:
        path = path_of(site.deletion_list)
        if not path.is_file():
            raise PipelineError(
                f"deletion_list: no file at {path}", "create an empty one if there is no user to forget"
            )
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise PipelineError(f"deletion_list: {path} is not UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                ids |= {parse_user_id(line.strip(), id_type)} if line.strip() else set()
            except PipelineError as error:
                raise PipelineError(f"{path}, line {number}: {error}") from None
    return pa.array(sorted(ids), id_arrow_type(id_type))
