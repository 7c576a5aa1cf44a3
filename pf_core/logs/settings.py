"""The part of a site file that ingestion reads."""

from dataclasses import dataclass
from pathlib import Path

from pf_core.config.site import Site
from pf_core.config.source import ActionsSource, Positive
from pf_core.config.training_section import AnswerColumn


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """The fields of a Site that ingestion tasks read.

    Tasks carry these instead of the Site, because a Site holds substituted secrets (the password in
    serving.store.url), and a task is pickled and sent to the machines of a cluster.
    """

    actions: ActionsSource
    answers: AnswerColumn | None
    """The column that says who may be learned from."""
    positive: Positive
    log_root: Path
    """Folder that the paths of the log files count from."""
    directory: Path
    """Folder of the site's assets; raw_actions is in it."""
    workspace: Path
    """Folder on this machine for temporary files."""
    start_ds: str
    end_ds: str | None
    num_buckets: int
    fingerprint: str
    """Site.fingerprint(), recorded in every manifest."""

    @classmethod
    def of(cls, site: Site) -> "IngestSettings":
        return cls(
            actions=site.source.actions,
            answers=site.answers,
            positive=site.source.positive,
            log_root=site.log_root,
            directory=site.directory,
            workspace=site.workspace,
            start_ds=site.start_ds,
            end_ds=site.end_ds,
            num_buckets=site.timelines.num_buckets,
            fingerprint=site.fingerprint(),
        )
