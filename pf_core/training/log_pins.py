"""Pins that the users who train have acted on: what a model may know of a log that nothing else describes.

pin_features has every pin with an action of anybody. A pin that nobody but other users acted on would take a row of
the training set, and so change the random numbers and the sizes of a model: with `training.users`, the set leaves it
out. Memory grows with the number of distinct pins alone.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.training_users import TrainingUsers
from pf_core.progress import Progress
from pf_core.schemas import id_arrow_type
from pf_core.timelines.build import StoredTimelines, TimelineManifest, stored_timelines


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    timelines: StoredTimelines
    forgotten: pa.Array
    users: TrainingUsers


def pins_of_training_users(
    site: Site, timelines: StateDay[TimelineManifest], users: TrainingUsers, *, engine: Engine, progress: Progress
) -> pa.Array | None:
    """Return the distinct pins in the timelines of the users who train; None without `training.users`.

    A choice that leaves nobody to train on is a PipelineError.
    """
    if users.selection is None:
        return None
    forgotten = read_deletion_list(site)
    tasks = [
        _BucketTask(timelines=stored_timelines(timelines, bucket), forgotten=forgotten, users=users)
        for bucket in range(timelines.state.num_buckets)
    ]
    pins = pa.array([], id_arrow_type(site.source.pins.pin_id.type))
    for found in engine.map_buckets(_pins_of_bucket, tasks, progress):
        pins = pa.chunked_array([pins, found]).unique()
    if not len(pins):
        raise _nobody(site, users, timelines.manifest["ds"])
    return pins


def _nobody(site: Site, users: TrainingUsers, ds: str) -> PipelineError:
    assert site.training.users is not None
    if users.listed is None:
        return PipelineError(
            f"training.users.share {users.share} selects no user with a timeline as of {ds} who is not held out",
            "raise it in the site file",
        )
    if site.answers is not None:
        return PipelineError(
            f"training.users.column: as of {ds}, no user with a timeline who is not held out has one of the values "
            f"{', '.join(map(repr, site.answers.values))} in column {site.answers.column!r} of the newest row",
            "list the values of those who agreed exactly as the log has them",
        )
    return PipelineError(
        f"training.users.file: none of the {len(users.listed):,} users in {site.training.users.file}, such as "
        f"{users.listed[0].as_py()!r}, has a timeline as of {ds} and is not held out",
        "list the ids exactly as the log has them; `pf check` shows some of its rows",
    )


def _pins_of_bucket(task: _BucketTask) -> pa.Array:
    timelines = task.timelines.read(["pin_id"])
    timelines = timelines.filter(pc.invert(pc.is_in(timelines["user_id"], value_set=task.forgotten)))
    timelines = timelines.filter(pa.array(task.users.may_train(timelines["user_id"])))
    return pc.list_flatten(timelines["pin_id"]).unique()
