"""The users who asked to be forgotten."""

import re

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.schemas import id_arrow_type
from pf_core.storage.files import path_of


def parse_user_id(site: Site, text: str) -> int | str:
    """A user id as the logs have it, from what a person typed."""
    if site.source.actions.user_id.type == "string":
        return text
    if not re.fullmatch("-?[0-9]{1,19}", text) or abs(int(text)) >= 2**63:
        raise PipelineError(f"{text!r} is not an integer user id")
    return int(text)


def read_deletion_list(site: Site) -> pa.Array:
    """Ids of the users who asked to be forgotten, of the log's id type."""
    ids: set[int | str] = set()
    if site.deletion_list is not None:
        path = path_of(site.deletion_list)
        if not path.is_file():
            raise PipelineError(f"deletion_list: no file at {path}; make an empty one if nobody asked to be forgotten")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise PipelineError(f"deletion_list: {path} is not UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                ids |= {parse_user_id(site, line.strip())} if line.strip() else set()
            except PipelineError as error:
                raise PipelineError(f"{path}, line {number}: {error}") from None
    return pa.array(sorted(ids), id_arrow_type(site.source.actions.user_id.type))
