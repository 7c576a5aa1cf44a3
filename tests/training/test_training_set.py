"""The cut: training sees the timelines and pins of the cut's day, and nothing else."""

import hashlib
import json
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.config.serving import StoreConfig
from pf_core.config.source import PinsSource, Positive
from pf_core.config.training import choose
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.engine.daily_state import create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.hashing import is_held_out
from pf_core.pins.features import build_pin_features, pin_state
from pf_core.storage.arrays import read_arrow
from pf_core.storage.locks import exclusive
from pf_core.timelines.arrays import Timelines
from pf_core.training.batches import TrainingBatches
from pf_core.training.build_set import build_training_set
from pf_core.training.cut import cut_of, evaluation_days_of
from pf_core.training.packing import WITHOUT_VECTOR
from pf_core.training.plan import plan_model
from pf_core.training.training_set import (
    TrainingSet,
    TrainingSetManifest,
    latest_training_set,
    open_training_set,
    read_training_set_manifest,
)
from tests.support.scattered import ScatteredEngine
from tests.support.sites import START, SmallSite
from tests.support.unknown_pins import make_unknown

MakeSite = Callable[..., SmallSite]
DAYS = ds_range(START, shift_ds(START, 3))
DAY_S = 86_400
TYPES = {"save": "repin", "look": "closeup", "go": "click"}
PLACES = {"home": "homefeed", "find": "search"}


class Action(NamedTuple):
    user: Any
    pin: str
    second: float  # of its day
    event: str = "look"
    place: str = "home"
    dwell_s: float = 20.0


class Pin(NamedTuple):
    pin: str
    vector: tuple[float, float]
    shown: bool = True


def write_day(site: SmallSite, ds: str, actions: Sequence[Action], pins: Sequence[Pin]) -> None:
    day_us = ds_start_us(ds)
    is_int = site.site.source.actions.user_id.type == "int"
    users = [action.user if is_int else str(action.user) for action in actions]
    log = {
        "user": pa.array(users, pa.int64() if is_int else pa.string()),
        "pin": pa.array([action.pin for action in actions], pa.string()),
        "time_us": pa.array([day_us + round(action.second * 1e6) for action in actions], pa.int64()),
        "event": pa.array([action.event for action in actions], pa.string()),
        "place": pa.array([action.place for action in actions], pa.string()),
        "dwell_s": pa.array([action.dwell_s for action in actions], pa.float64()),
    }
    catalogue = {
        "pin": pa.array([pin.pin for pin in pins], pa.string()),
        "vector": pa.array([pin.vector for pin in pins], pa.list_(pa.float32())),
        "shown": pa.array([pin.shown for pin in pins], pa.bool_()),
    }
    for folder, columns in (("logs", log), ("pins", catalogue)):
        (site.root / folder).mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), site.root / folder / f"{ds}.parquet")


def configure(site: SmallSite, **training: Any) -> SmallSite:
    """Let the catalogue's column `shown` mark the candidates; `training` is the section of the site file."""
    source = site.site.source
    pins = source.pins.model_copy(update={"is_candidate": "shown"})
    changes = {"source": source.model_copy(update={"pins": pins}), "training": TrainingConfig(**training)}
    site.site = site.site.model_copy(update=changes)
    return site


def materialize(site: SmallSite, days: Sequence[str]) -> None:
    site.ingest(days)
    site.build(days)
    list(build_pin_features(site.site, days, engine=site.engine, progress=lambda _: None))


def build(site: SmallSite, cut_ds: str | None = None) -> tuple[TrainingSetManifest, TrainingSet]:
    manifest = build_training_set(site.site, cut_ds=cut_ds, engine=site.engine, progress=lambda _: None)
    return manifest, open_training_set(latest_training_set(site.site))


def in_words(data: TrainingSet, split: Timelines) -> dict[Any, list[tuple]]:
    """Every user's actions as plain Python: (ts_us, pin, action type, surface, duration, is positive)."""
    pin_ids = pa.ipc.open_file(data.path / "pins" / "pin_id.arrow").read_all()["pin_id"].to_pylist()
    result = {}
    for row, user in enumerate(split.user_ids().to_pylist()):
        actions = slice(split.offsets[row], split.offsets[row + 1])
        columns = [getattr(split, name)[actions].tolist() for name in ("ts", "pin", "action_type", "surface")]
        columns += [split.duration[actions].tolist(), split.is_positive[actions].tolist()]
        result[user] = [
            (ts, pin_ids[pin], data.action_types[kind], data.surfaces[place], duration, positive)
            for ts, pin, kind, place, duration, positive in zip(*columns, strict=True)
        ]
    return result


def hash_of(user: Any) -> int:
    """splitmix64 of an int, BLAKE2b of a text, in Python's integers."""
    if isinstance(user, str):
        return int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "little")
    mask = 2**64 - 1
    mixed = (user + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def expected(site: SmallSite, ds: str, pins: set[str], share: float) -> tuple[dict[Any, list], dict[Any, list]]:
    """The definition: (train, held out), from the timelines of ds."""
    train: dict[Any, list] = {}
    held_out: dict[Any, list] = {}
    for user, timeline in site.timelines(ds).items():
        rows = []
        for ts, pin, kind, place, duration in timeline:
            is_positive = kind == "repin" or (kind in ("closeup", "click") and duration > 10)
            is_positive = is_positive and place == "homefeed"
            if pin in pins:
                rows.append((round(ts.timestamp() * 1e6), pin, kind, place, duration, is_positive))
        (held_out if hash_of(user) % 10_000 < share * 10_000 else train)[user] = rows
    words = {word for rows in train.values() for row in rows for word in row[2:4]}
    held_out = {user: [row for row in rows if words.issuperset(row[2:4])] for user, rows in held_out.items()}
    return tuple({user: rows for user, rows in split.items() if rows} for split in (train, held_out))  # type: ignore


def random_world(site: SmallSite, *, num_users: int = 60) -> set[str]:
    """Days of actions on pins of which a few have no feature, and one is unknown; returns the pins that are known."""
    random = np.random.default_rng(7)
    users = random.choice(10**12, num_users, replace=False).tolist()
    pins = [f"pin{number}" for number in random.permutation(40).tolist()]
    for number, ds in enumerate(DAYS):
        actions = [
            Action(
                users[random.integers(num_users)],
                pins[random.integers(40)],
                random.integers(DAY_S * 2) / 2,
                sorted(TYPES)[random.integers(3)],
                sorted(PLACES)[random.integers(2)],
                float(random.integers(5, 16)),
            )
            for _ in range(150)
        ]
        added = [Pin(pin, (float(number), float(pin[3:])), shown=int(pin[3:]) % 3 > 0) for pin in pins[number:35:4]]
        write_day(site, ds, actions, added)
    materialize(site, DAYS)
    make_unknown(site.site, DAYS[-1], pins[0])
    return set(pins[1:])


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_the_arrays_hold_the_timelines(small_site: MakeSite, id_type: str) -> None:
    site = configure(small_site(id_type=id_type, timelines={"num_buckets": 3}), held_out_share=0.3)
    pins = random_world(site)
    manifest, data = build(site, DAYS[-1])
    train, held_out = expected(site, DAYS[-1], pins, 0.3)
    assert in_words(data, data.train) == train
    assert in_words(data, data.held_out) == held_out
    assert len(train) > 30
    assert len(held_out) > 5
    counts = manifest["counts"]
    for counted, split in ((counts["train"], train), (counts["held_out"], held_out)):
        assert counted == {
            "users": len(split),
            "actions": sum(len(rows) for rows in split.values()),
            "positives": sum(row[-1] for rows in split.values() for row in rows),
        }
    num_unknown = sum(row[1] not in pins for rows in site.timelines(DAYS[-1]).values() for row in rows)
    assert manifest["counts"]["dropped"]["no_feature"] == num_unknown > 0
    assert manifest["time_origin_us"] == min(row[0] for rows in train.values() for row in rows)
    assert data.cut_us == ds_start_us(DAYS[-1]) + 86_400_000_000
    assert data.train.num_users == len(train)


def test_the_files_are_as_laid_out(small_site: MakeSite) -> None:
    site = configure(small_site(), held_out_share=0.3)
    pins = random_world(site)
    manifest, data = build(site, DAYS[-1])
    assert data.path == site.site.directory / "training_set" / manifest["build"]
    types = {name: getattr(data.train, name).dtype.name for name in ("offsets", "pin", "ts", "action_type", "surface")}
    assert types == {"offsets": "int64", "pin": "int32", "ts": "int64", "action_type": "int16", "surface": "int16"}
    assert (data.train.duration.dtype, data.train.is_positive.dtype) == (np.float32, np.bool_)
    assert isinstance(data.pin_feature, np.memmap)
    pin_ids = pa.ipc.open_file(data.path / "pins" / "pin_id.arrow").read_all()["pin_id"].to_pylist()
    assert pin_ids == sorted(pins)
    assert data.pin_feature.dtype == np.float32
    assert isinstance(data.has_feature, np.memmap)
    assert data.has_feature.dtype == np.bool_
    assert int((~data.has_feature).sum()) == 5
    assert not data.all_have_feature
    described = [row for row, pin in enumerate(pin_ids) if data.has_feature[row]]
    assert data.pin_feature[described, 1].tolist() == [float(pin_ids[row][3:]) for row in described]
    assert not data.pin_feature[~data.has_feature].any()
    assert data.candidates.dtype == np.int64
    assert data.candidates.tolist() == [row for row in described if int(pin_ids[row][3:]) % 3 > 0]
    assert data.content_candidates.tolist() == data.candidates.tolist()  # the catalogue names the candidates
    assert manifest["counts"]["pins"] == 39
    assert manifest["counts"]["with_feature"] == 34
    assert manifest["counts"]["candidates"] == len(data.candidates)
    assert manifest["feature_dim"] == 2
    assert data.action_types == ["click", "closeup", "repin"]
    assert data.surfaces == ["homefeed", "search"]
    user_ids = data.train.user_ids().to_pylist()
    assert user_ids == sorted(user_ids, key=lambda user: (hash_of(user) % 2, user))  # by bucket, then by id
    assert not (data.path / "parts").exists()
    assert data.manifest == manifest
    assert manifest["inputs"]["user_timelines"]["raw_digests"].keys() == set(DAYS)
    again = pickle.loads(pickle.dumps(data))
    assert isinstance(again.pin_feature, np.memmap)
    assert np.array_equal(again.train.pin, data.train.pin)


def held_out_and_train_users(share: float) -> tuple[list[int], list[int]]:
    held_out = [user for user in range(100) if hash_of(user) % 10_000 < share * 10_000]
    return held_out, [user for user in range(100) if user not in held_out]


def test_what_is_dropped_is_counted(small_site: MakeSite) -> None:
    site = configure(small_site(), held_out_share=0.5)
    (h1, h2, h3, *_), (t1, t2, *_) = held_out_and_train_users(0.5)
    actions = [
        Action(t1, "a", 1.0),
        Action(t1, "none", 2.0, "go"),  # an unknown pin: and a word that no other action of train has
        Action(t2, "none", 3.0),  # all that this user has
        Action(h1, "a", 4.0),
        Action(h1, "b", 5.0, "go"),  # unknown type
        Action(h1, "b", 6.0, "look", "find"),  # unknown surface
        Action(h2, "b", 7.0, "go", "find"),  # both, counted once; all that this user has
        Action(h3, "none", 8.0, "go"),  # counted as on an unknown pin
    ]
    write_day(site, START, actions, [Pin("a", (1.0, 0.0)), Pin("b", (0.0, 1.0))])
    materialize(site, [START])
    make_unknown(site.site, START, "none")
    manifest, data = build(site, START)
    assert manifest["counts"] == {
        "train": {"users": 1, "actions": 1, "positives": 1},
        "held_out": {"users": 1, "actions": 1, "positives": 1},
        "dropped": {"no_feature": 3, "unknown_action_type": 2, "unknown_surface": 1},
        "held_out_no_feature": 1,
        "users_left_out": 3,
        "users_forgotten": 0,
        "pins": 2,
        "candidates": 2,
        "with_feature": 2,
    }
    assert manifest["vocabularies"] == {"action_type": ["closeup"], "surface": ["homefeed"]}
    first_us = ds_start_us(START)
    without_vector = read_arrow(data.path / "held_out" / WITHOUT_VECTOR)
    without_vector = without_vector.set_column(2, "ts", without_vector["ts"].cast(pa.int64()))
    assert without_vector.to_pylist() == [{"user_id": h3, "pin_id": "none", "ts": first_us + 8_000_000}]
    assert in_words(data, data.train) == {t1: [(first_us + 1_000_000, "a", "closeup", "homefeed", 20.0, True)]}
    assert in_words(data, data.held_out) == {h1: [(first_us + 4_000_000, "a", "closeup", "homefeed", 20.0, True)]}
    assert manifest["time_origin_us"] == first_us + 1_000_000


@pytest.mark.parametrize("ids", [list(range(-3000, 3000)), [f"user {number}" for number in range(6000)]])
def test_users_are_held_out_by_hash(ids: list[Any]) -> None:
    for share, num_shares in ((0.0, 0), (0.07, 700), (0.1, 1000), (0.29, 2900)):
        assert is_held_out(pa.array(ids), share).tolist() == [hash_of(user) % 10_000 < num_shares for user in ids]


def test_nobody_need_be_held_out(small_site: MakeSite) -> None:
    site = configure(small_site(), held_out_share=0)
    write_day(site, START, [Action(user, "a", user) for user in range(20)], [Pin("a", (1.0, 0.0))])
    materialize(site, [START])
    _, data = build(site, START)
    assert data.train.num_users == 20
    assert data.held_out.num_users == 0
    assert data.held_out.offsets.tolist() == [0]
    assert len(data.held_out.ts) == len(data.held_out.user_ids()) == 0


def test_forgotten_users_are_left_out(small_site: MakeSite) -> None:
    """Also from a day that was built before they were on the deletion list."""
    site = configure(small_site(), held_out_share=0)
    write_day(site, START, [Action(user, "a", user) for user in range(20)], [Pin("a", (1.0, 0.0))])
    materialize(site, [START])
    (site.root / "forget.txt").write_text("4\n12345\n")
    manifest, data = build(site, START)
    assert sorted(data.train.user_ids().to_pylist()) == [user for user in range(20) if user != 4]
    assert manifest["counts"]["users_forgotten"] == 1
    assert manifest["counts"]["users_left_out"] == 0


# Nothing later than the cut


@st.composite
def worlds(draw: st.DrawFn) -> list[tuple[list[Action], list[Pin]]]:
    """Four days, few users and pins; a later day may change a pin's vector, or show one for the first time."""
    action = st.builds(
        Action,
        st.integers(0, 12),
        st.sampled_from(["p", "q", "r"]),
        st.sampled_from([0.0, 1.0, DAY_S - 0.000001]),
        st.sampled_from(sorted(TYPES)),
        st.sampled_from(sorted(PLACES)),
        st.sampled_from([5.0, 20.0]),
    )
    pin = st.builds(Pin, st.sampled_from(["p", "q", "r"]), st.tuples(*[st.sampled_from([0.0, 1.0])] * 2), st.booleans())
    days = []
    for number in range(4):
        actions = draw(st.lists(action, max_size=8))
        if number == 0:
            actions += [Action(user, "p", 2.0, "save") for user in range(13)]
        pins = {pin.pin: pin for pin in draw(st.lists(pin, max_size=2))}
        if number == 0:
            pins |= {"p": Pin("p", (1.0, 1.0)), "always": Pin("always", (1.0, 0.0))}
        days.append((actions, list(pins.values())))
    return days


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.integers(0, 2))
def test_nothing_later_than_the_cut_has_an_influence(world: list[tuple[list[Action], list[Pin]]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        manifests = []
        for name, num_days in (("long", 4), ("short", cut + 1)):
            (Path(folder) / name).mkdir()
            site = configure(SmallSite(Path(folder) / name), held_out_share=0.3, evaluation_days=num_days - 1 - cut)
            for ds, (actions, pins) in list(zip(DAYS, world, strict=True))[:num_days]:
                write_day(site, ds, actions, pins)
            materialize(site, DAYS[:num_days])
            assert cut_of(site.site) == DAYS[cut]
            manifest, data = build(site)
            for split in (data.train, data.held_out):
                assert (split.ts < ds_start_us(shift_ds(DAYS[cut], 1))).all()
            manifests.append(dict(manifest))
        for name in ("files", "fingerprint", "counts", "vocabularies", "time_origin_us", "cut_us"):
            assert manifests[0][name] == manifests[1][name]


# The same data gives the same set


def test_a_second_build_replaces_the_first_and_is_equal(small_site: MakeSite) -> None:
    site = configure(small_site(), held_out_share=0.3)
    random_world(site)
    first, data = build(site, DAYS[2])
    newest = data.train.ts.max()
    second, again = build(site, DAYS[2])
    assert second["fingerprint"] == first["fingerprint"] == again.fingerprint
    assert second["files"] == first["files"]
    assert not data.path.exists()
    assert data.train.ts.max() == newest  # what is mapped stays readable
    with pytest.raises(PipelineError, match=r"a newer one has replaced it.*--select training_set"):
        open_training_set(data.path)
    assert build(site, DAYS[3])[0]["fingerprint"] != first["fingerprint"]


def test_how_the_partitions_came_about_does_not_matter(small_site: MakeSite) -> None:
    """Days one by one, pins changed and added: or all of it on the last day."""
    pins = [Pin(name, (float(number), 0.0)) for number, name in enumerate("qzamk")]
    old = [Pin("z", (9.0, 9.0), False), *pins[2:3]]
    actions = [Action(user, pins[(user + n) % 5].pin, float(n)) for user in range(30) for n in range(4)]
    manifests = []
    for days in ([old, pins[:2], pins[3:]], [old[:1], [], pins]):
        site = configure(small_site(), held_out_share=0.3)
        for ds, added in zip(DAYS, days, strict=False):
            write_day(site, ds, actions[::2] if ds == DAYS[0] else actions, added)
        materialize(site, DAYS[:3])
        manifests.append(build(site, DAYS[2])[0])
        site.build(DAYS[2:3], rebuild=True)
        manifests.append(build(site, DAYS[2])[0])
    assert len({manifest["fingerprint"] for manifest in manifests}) == 1
    assert {manifest["counts"]["pins"] for manifest in manifests} == {5}


def test_the_number_of_buckets_and_workers_does_not_matter(small_site: MakeSite) -> None:
    results = []
    for num_buckets in (1, 5):
        site = configure(small_site(timelines={"num_buckets": num_buckets}), held_out_share=0.3)
        random_world(site)
        _, data = build(site, DAYS[-1])
        results.append((in_words(data, data.train), in_words(data, data.held_out)))
    assert results[0] == results[1]
    messages: list[str] = []
    with LocalEngine(num_workers=2, memory_mb=256, temp_dir=site.root / "tmp") as engine:
        manifest = build_training_set(site.site, cut_ds=DAYS[-1], engine=engine, progress=messages.append)
    assert manifest["fingerprint"] == data.fingerprint
    assert "training_set: all 5 buckets packed" in messages
    assert manifest["fingerprint"] in messages[-1]


def test_tasks_do_not_carry_the_secrets_of_the_site(small_site: MakeSite) -> None:
    """Tasks are pickled and travel to other machines; the password of the store is no business of theirs."""
    site = configure(small_site(), held_out_share=0.3)
    random_world(site)
    store = StoreConfig(kind="redis", url="redis://:a-secret@localhost:6379/0")
    serving = site.site.serving.model_copy(update={"store": store})
    site.site = site.site.model_copy(update={"serving": serving})
    assert b"a-secret" in pickle.dumps(site.site)

    class Recording(ScatteredEngine):
        packed: ClassVar[list[bytes]] = []

        def _attempt(self, packed: bytes) -> bytes:
            self.packed.append(packed)
            return super()._attempt(packed)

    here = build(site, DAYS[-1])[0]["fingerprint"]
    elsewhere = build_training_set(site.site, cut_ds=DAYS[-1], engine=Recording(), progress=lambda _: None)
    assert elsewhere["fingerprint"] == here
    assert len(Recording.packed) == 2 + 1  # two buckets, of which the second runs twice
    assert not any(b"a-secret" in packed for packed in Recording.packed)


# What is refused


def simple(small_site: MakeSite, *, pins: Sequence[Pin] = (Pin("a", (1.0, 0.0)),), **training: Any) -> SmallSite:
    """Two days, twenty users."""
    site = configure(small_site(), **training)
    for ds in DAYS[:2]:
        write_day(site, ds, [Action(user, "a", user) for user in range(20)], pins)
    materialize(site, DAYS[:2])
    return site


def refused(site: SmallSite, match: str, cut_ds: str | None = START) -> None:
    with pytest.raises(PipelineError, match=match):
        build(site, cut_ds)
    assert list((site.site.directory / "training_set").glob("build-*")) == []


def test_without_timelines(small_site: MakeSite) -> None:
    site = configure(small_site())
    for cut_ds in (None, START):
        refused(site, r"no user_timelines yet.*--select raw_actions,pin_features,user_timelines .*2026-01-01", cut_ds)


def test_the_cut_lies_within_the_site(small_site: MakeSite) -> None:
    site = simple(small_site, evaluation_days=14)
    refused(site, "set training.evaluation_days in the site file to at most 1", None)
    refused(site, "the cut 2025-12-31 is before the site's start 2026-01-01", "2025-12-31")
    refused(site, "YYYY-MM-DD", "1.1.2026")
    refused(site, r"user_timelines has no partition 2026-01-03; make it with: dagster", DAYS[2])
    site = configure(site, evaluation_days=1)
    assert build(site)[0]["cut_ds"] == DAYS[0]


def test_a_short_log_keeps_a_quarter_of_its_days(small_site: MakeSite) -> None:
    site, messages = simple(small_site), list[str]()
    manifest = build_training_set(site.site, cut_ds=None, engine=site.engine, progress=messages.append)
    reason = "the default: a quarter of the site's 2 days"
    assert (manifest["cut_ds"], manifest["evaluation_days"]) == (DAYS[0], {"num_days": 1, "reason": reason})
    line = f"training_set: training ends with {DAYS[0]}, 1 day before the newest timelines ({reason})"
    assert any(message.startswith(line) for message in messages)
    assert read_training_set_manifest(latest_training_set(site.site)) == manifest


def test_the_manifest_says_where_the_cut_comes_from(small_site: MakeSite) -> None:
    site = simple(small_site, evaluation_days=0)
    stated = {"num_days": 0, "reason": "training.evaluation_days in the site file"}
    manifest = build(site)[0]
    assert (manifest["cut_ds"], manifest["evaluation_days"]) == (DAYS[1], stated)
    chosen = {"num_days": 1, "reason": f"the cut {START} was chosen for this run"}
    assert build(site, START)[0]["evaluation_days"] == chosen


@pytest.mark.parametrize(
    ("num_days", "kept"),
    [(1, 0), (2, 1), (4, 4 // 4), (18, 18 // 4), (55, 55 // 4), (56, 14), (365, 14)],
)
def test_evaluation_days_by_default(
    small_site: MakeSite, monkeypatch: pytest.MonkeyPatch, num_days: int, kept: int
) -> None:
    """Days before the site's start and after the newest timelines do not count."""
    site, days = small_site().site, ds_range(shift_ds(START, -3), shift_ds(START, num_days + 3))
    newest = shift_ds(START, num_days - 1)
    monkeypatch.setattr("pf_core.training.cut.ingested_days", lambda _: days)
    monkeypatch.setattr("pf_core.training.cut.newest_timelines", lambda _: newest)
    assert evaluation_days_of(site)["num_days"] == kept
    assert cut_of(site) == shift_ds(newest, -kept)
    assert cut_of(site) >= site.start_ds


def test_without_pin_features(small_site: MakeSite) -> None:
    site = simple(small_site)
    pin_state(site.site).manifest_path(START).unlink()
    refused(site, r"pin_features has no partition 2026-01-01; make it with: dagster")


def test_without_a_user_to_train_on(small_site: MakeSite) -> None:
    site = simple(small_site, pins=[Pin("other", (1.0, 0.0))])
    make_unknown(site.site, START, "a", "b")
    refused(
        site, r"no user is left to train on as of 2026-01-01: 0 are held out, and 20 .*\(20 actions .*held_out_share"
    )


def test_without_a_positive_action(small_site: MakeSite) -> None:
    site = simple(small_site)
    source = site.site.source.model_copy(update={"positive": Positive(action_types=("buy",))})
    site.site = site.site.model_copy(update={"source": source})
    refused(site, r"none of the \d+ actions .* is positive.*'buy'.*'closeup'.*fix source.positive, then: dagster")


def test_without_a_candidate(small_site: MakeSite) -> None:
    site = simple(small_site, pins=[Pin("a", (1.0, 0.0), shown=False)])
    refused(
        site, r"none of the 1 pins of pin_features 2026-01-01 is a candidate.*--select pin_features --partition 2026"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_are_finite(small_site: MakeSite, value: float) -> None:
    site = simple(small_site)
    state = pin_state(site.site)
    rows = state.open_bucket(START, 0).to_table()
    bad = pa.table({"pin_id": ["b"], "feature": [[0.0, value]], "interest": ["x"], "is_candidate": [True]})
    bad = bad.append_column("has_feature", pa.array([True]))
    bad = bad.select(rows.column_names).cast(rows.schema)
    version = create_bucket(state.bucket_path(0), pa.concat_tables([rows, bad])).version
    state.publish(START, [version], state.require(START))
    refused(
        site, r"the feature of pin 'b' has a value that is not finite.*--select pin_features --partition 2026-01-01"
    )


def test_a_failure_leaves_the_set_before_it(small_site: MakeSite) -> None:
    site = simple(small_site)
    _, data = build(site, START)
    pin_state(site.site).manifest_path(DAYS[1]).unlink()
    with pytest.raises(PipelineError, match="pin_features has no partition"):
        build(site, DAYS[1])
    assert open_training_set(latest_training_set(site.site)).fingerprint == data.fingerprint
    assert [path.name for path in (site.site.directory / "training_set").glob("build-*")] == [data.path.name]


def test_timelines_that_change_meanwhile(small_site: MakeSite) -> None:
    site = simple(small_site)

    def rebuild_timelines(message: str) -> None:
        if "candidates" in message:
            site.build([START])

    with pytest.raises(PipelineError, match="user_timelines 2026-01-01 was rebuilt while it was read"):
        build_training_set(site.site, cut_ds=START, engine=site.engine, progress=rebuild_timelines)


def test_a_log_that_is_ingested_again_meanwhile(small_site: MakeSite) -> None:
    """The user-days of the pins come from raw_actions, not from the timelines; here, those of an earlier run."""
    site = simple(small_site)
    _, data = build(site, START)

    def ingest_again(message: str) -> None:
        if "user-days" in message:
            write_day(site, START, [Action(user, "a", user) for user in range(10)], [Pin("a", (1.0, 0.0))])
            site.ingest([START])

    with pytest.raises(
        PipelineError, match="raw_actions 2026-01-01 was ingested again while training_set was made from it"
    ):
        build_training_set(site.site, cut_ds=START, engine=site.engine, progress=ingest_again)
    assert latest_training_set(site.site) == data.path


def test_one_run_at_a_time(small_site: MakeSite) -> None:
    site = simple(small_site)
    with exclusive(site.site.directory / "training_set", "training_set"):
        refused(site, "another run is writing training_set")


def test_a_site_without_a_catalogue_and_without_vectors(small_site: MakeSite) -> None:
    site = simple(small_site)
    source = site.site.source.model_copy(update={"pins": PinsSource(pin_id=site.site.source.actions.pin_id)})
    site.site = site.site.model_copy(update={"source": source})
    list(build_pin_features(site.site, [START], engine=site.engine, progress=lambda _: None))
    manifest, data = build(site, START)
    assert manifest["feature_dim"] == 0
    assert data.pin_feature.shape == (manifest["counts"]["pins"], 0)
    assert not data.has_feature.any()
    assert len(data.candidates) == manifest["counts"]["candidates"] == manifest["counts"]["pins"]
    assert len(data.content_candidates) == manifest["counts"]["with_feature"] == 0
    assert manifest["counts"]["dropped"]["no_feature"] == 0
    complaint = "preset demo reads content vectors, and the site has none; set training.preset to auto"
    with pytest.raises(PipelineError, match=f"^{complaint}$"):
        plan_model(site.site, "demo", {})
    content_alone = {"factor_dim": 0, "trend_dim": 0}
    with pytest.raises(PipelineError, match="a vector would have no part"):
        plan_model(site.site, "auto", {"parts": content_alone})
    with pytest.raises(PipelineError, match=r"leave the content part alone on, .* delete parts\.trend_dim or"):
        plan_model(site.site, "auto", {"parts": {**content_alone, "content": True}})
    with pytest.raises(PipelineError, match="no candidate has a content vector, which this model reads"):
        TrainingBatches(data.path, choose("tiny", {}), rank=0, world_size=1)


def test_a_set_of_the_older_layout_is_refused(small_site: MakeSite) -> None:
    site = simple(small_site)
    _, data = build(site, START)
    manifest = json.loads((data.path / "training_set.json").read_text())
    del manifest["layout"], manifest["counts"]["with_feature"]
    (data.path / "training_set.json").write_text(json.dumps(manifest))
    with pytest.raises(PipelineError, match=r"was stored in layout 1, .* reads layout 2; .*--select training_set "):
        open_training_set(data.path)


def test_no_set_yet(small_site: MakeSite) -> None:
    with pytest.raises(PipelineError, match=r"no training set in .*--select training_set"):
        latest_training_set(small_site().site)
