"""user_embeddings: who is embedded on a day, what a day is a function of, and that nothing bad is ever visible."""

import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pf_core.config.serving import ServingConfig, StoreConfig
from pf_core.config.training import choose
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.tables import embedding_state
from pf_core.embeddings.users import embed_days
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of, digest_of
from pf_core.model.checkpoint import save_model
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import build_pin_features
from pf_core.pins.lookup import find_pins
from pf_core.schemas import INPUT_HASH, user_embeddings_schema
from pf_core.timelines.build import StoredTimelines
from tests.support.sites import START, Row, SmallSite
from tests.support.unknown_pins import make_unknown

REPOSITORY = Path(__file__).parents[2]
DAYS = ds_range(START, shift_ds(START, 3))
DAY_S = 86_400
FEATURE_DIM = 6
DIM = 8
PINS = [f"p{number}" for number in range(20)]
WORDS = ["click", "closeup", "repin"]


@dataclass
class DailySite:
    """A small site with pins, timelines and models; embeddings come back as plain Python."""

    root: Path
    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.small = SmallSite(self.root, self.options)
        serving = ServingConfig.model_validate(self.options.get("serving", {}))
        self.small.site = self.site = self.small.site.model_copy(update={"serving": serving})
        self.state = embedding_state(self.site)

    def add_day(self, ds: str, rows: Sequence[Row], pins: Sequence[str] = ()) -> None:
        """Log, catalogue, raw_actions, pin_features (which does not have the pin "unknown"), user_timelines."""
        self.small.write_log(ds, rows)
        self.write_pins(ds, [*PINS, *pins] if ds == START else pins)
        self.small.ingest([ds])
        self.build_pins([ds])
        if any(row[1] == "unknown" for row in rows):
            make_unknown(self.site, ds, "unknown")
        self.small.build([ds])

    def write_pins(self, ds: str, pins: Sequence[str], *, seed: int = 0) -> None:
        path = self.root / "pins" / f"{ds}.parquet"
        path.parent.mkdir(exist_ok=True)
        vectors = [np.random.default_rng([seed, *pin.encode()]).normal(size=FEATURE_DIM).tolist() for pin in pins]
        columns = {"pin": pa.array(pins, pa.string()), "vector": pa.array(vectors, pa.list_(pa.float32()))}
        pq.write_table(pa.table(columns), path)

    def build_pins(self, days: Sequence[str]) -> None:
        list(build_pin_features(self.site, days, engine=self.small.engine, progress=lambda _: None))

    def make_model(
        self, version: str, *, words: Sequence[str] = WORDS, feature_dim: int = FEATURE_DIM, is_broken: bool = False
    ) -> ServedModel:
        served = ServedModel(model_version=version, path=self.root / "models" / version)
        torch.manual_seed(int.from_bytes(version.encode(), "little"))
        sizes = {"num_action_types": len(words), "num_surfaces": 2, "time_origin_us": 0}
        model = PinnerFormer(choose("tiny", {}).model, feature_dim=feature_dim, **sizes)
        if is_broken:
            torch.nn.init.constant_(model.project.bias, float("nan"))
        described = {"action_types": list(words), "surfaces": ["homefeed", "search"], "feature_dim": feature_dim}
        save_model(served.path, model, described | {"time_origin_us": 0, "feature_scale": 1.0})
        return served

    def embed(
        self,
        days: Sequence[str],
        *,
        model: str | Callable[[str], ServedModel] = "one",
        everyone: bool = False,
        engine: LocalEngine | None = None,
    ) -> list[dict[str, Any]]:
        served = self.make_model(model) if isinstance(model, str) else None
        made = embed_days(
            self.site,
            days,
            model_for=lambda ds: served or model(ds),  # type: ignore[operator]
            everyone=everyone,
            engine=engine or self.small.engine,
            progress=self.said.append,
        )
        return list(made)

    def table(self, ds: str) -> pa.Table:
        buckets = range(self.state.num_buckets)
        return pa.concat_tables([self.state.open_bucket(ds, bucket).to_table() for bucket in buckets])

    def rows(self, ds: str) -> dict[Any, tuple[Any, ...]]:
        """By user: the embedding's bytes, and the other columns."""
        table = self.table(ds)
        vectors = [vector.tobytes() for vector in matrix_of(table["embedding"])]
        others = table.drop_columns(["user_id", "embedding"]).to_pylist()
        users = table["user_id"].to_pylist()
        assert len(set(users)) == len(users)
        values = zip(vectors, others, strict=True)
        return {user: (vector, *other.values()) for user, (vector, other) in zip(users, values, strict=True)}

    def num_actions(self, ds: str) -> dict[Any, int]:
        table = self.table(ds)
        return dict(zip(table["user_id"].to_pylist(), table["num_actions"].to_pylist(), strict=True))

    def seen(self, ds: str) -> dict[Any, tuple[list[Any], bool]]:
        """By user: the seen pins, and whether they are all."""
        rows = self.table(ds).select(["user_id", "seen_pin_id", "seen_is_complete"]).to_pylist()
        return {row["user_id"]: (row["seen_pin_id"], row["seen_is_complete"]) for row in rows}

    def forget(self, *users: Any) -> None:
        (self.root / "forget.txt").write_text("".join(f"{user}\n" for user in users))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def daily_site(tmp_path: Path) -> Iterator[Callable[..., DailySite]]:
    made: list[DailySite] = []

    def make(**options: Any) -> DailySite:
        root = tmp_path / f"daily-{len(made)}"
        root.mkdir()
        made.append(DailySite(root, options))
        return made[-1]

    yield make
    for site in made:
        site.small.engine.__exit__(None, None, None)


def look(user: Any, day: int, *, num: int = 1, pin: str | None = None) -> list[Row]:
    """That many actions of a user on a day."""
    number = int(user) if str(user).isdigit() else len(str(user))
    return [
        (user, pin or PINS[(number + 3 * day + 7 * n) % len(PINS)], day * DAY_S + 60.0 * n + number, "look")
        for n in range(num)
    ]


def four_days(site: DailySite, users: Sequence[Any] = range(30)) -> DailySite:
    """Everybody is active on the first day, user u on day d if d divides u, from the second day on."""
    for day, ds in enumerate(DAYS):
        active = [user for number, user in enumerate(users) if day == 0 or number % (day + 1) == 0]
        site.add_day(ds, [row for user in active for row in look(user, day, num=1 + len(str(user)) + day)])
    return site


# --- who is embedded --------------------------------------------------------------------------------


def test_everyone_on_the_first_day_then_the_active_users(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    first, second, third = site.embed(DAYS[:3])
    assert [manifest["mode"] for manifest in (first, second, third)] == ["everyone", "active", "active"]
    assert first["reason"] == "there is no earlier day"
    assert set(site.rows(DAYS[0])) == set(range(30))
    assert set(site.rows(DAYS[1])) == {user for user in range(30) if user % 2 == 0}
    assert set(site.rows(DAYS[2])) == {user for user in range(30) if user % 3 == 0}
    assert second["counts"] == second["counts"] | {
        "users": 15,
        "active_users": 15,
        "active_users_with_embedding": 15,
        "embedded": 15,
        "reused": 0,
        "without_actions": 0,
        "no_feature": 0,
        "unknown_word": 0,
    }
    assert any("everyone is embedded, because there is no earlier day" in line for line in site.said)
    assert any(line.startswith(f"user_embeddings {DAYS[2]}: 10 users embedded") for line in site.said)


def test_a_row_is_what_the_contract_says(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    _, manifest = site.embed(DAYS[:2])
    table = site.table(DAYS[1])
    assert table.schema.equals(user_embeddings_schema("int", "string", DIM).append(INPUT_HASH))
    for bucket in range(2):
        users = site.state.open_bucket(DAYS[1], bucket).to_table()["user_id"]
        assert users.to_pylist() == sorted(users.to_pylist())
        assert set(bucket_of(users, 2).tolist()) <= {bucket}
    by_user = {row["user_id"]: row for row in table.to_pylist()}
    timelines = site.small.timelines(DAYS[1])
    for user, row in by_user.items():
        assert row["model_version"] == "one"
        assert row["computed_ds"] == date(2026, 1, 2)
        assert row["last_action_ts"] == timelines[user][-1][0]
        assert row["num_actions"] == min(len(timelines[user]), 8)  # the tiny model's sequence length
        assert row["memory_pin_id"] == row["memory_increment"] == []  # the towers have no memory
        assert set(row["seen_pin_id"]) == {action[1] for action in timelines[user]}
    vectors = matrix_of(table["embedding"]).astype(np.float64)
    np.testing.assert_allclose(manifest["mean_vector"], vectors.mean(axis=0), atol=1e-12)
    assert manifest["embedding_dim"] == DIM
    assert manifest["digest"] == digest_of(manifest["inputs"])
    assert set(manifest["inputs"]) == {
        "timelines",
        "pin_features_version",
        "model_version",
        "mode",
        "seen_size",
        "forgotten",
    }
    assert manifest["slices"] == {"embedding": [0, DIM]}
    assert manifest["counts"]["actions"] == sum(row["num_actions"] for row in by_user.values())
    json.dumps(manifest)


def test_active_users_have_the_vectors_that_embedding_everyone_gives(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS)
    active = {ds: site.rows(ds) for ds in DAYS}
    for ds in DAYS[1:]:
        [manifest] = site.embed([ds], model=site_model(site), everyone=True)
        assert manifest["mode"] == "everyone"
        everyone = site.rows(ds)
        assert len(everyone) == 30
        assert {user: everyone[user] for user in active[ds]} == active[ds]


def site_model(site: DailySite, version: str = "one") -> Callable[[str], ServedModel]:
    return lambda ds: ServedModel(model_version=version, path=site.root / "models" / version)


def test_a_new_model_embeds_everyone_once(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    models = [site.make_model(version) for version in ("one", "two")]
    manifests = site.embed(DAYS, model=lambda ds: models[ds >= DAYS[2]])
    assert [manifest["mode"] for manifest in manifests] == ["everyone", "active", "everyone", "active"]
    assert manifests[2]["reason"] == "the model changed from one to two"
    assert [manifest["model_version"] for manifest in manifests] == ["one", "one", "two", "two"]
    assert len(site.rows(DAYS[2])) == 30
    assert any("because the model changed from one to two" in line for line in site.said)


def test_everyone_is_for_the_first_of_the_days(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:1])
    manifests = site.embed(DAYS[1:], everyone=True)
    assert [manifest["mode"] for manifest in manifests] == ["everyone", "active", "active"]
    assert manifests[0]["reason"] == "the run's configuration says so"


def test_users_whose_actions_left_the_window_are_not_embedded(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site(timelines={"window_days": 2})
    site.add_day(DAYS[0], [*look(1, 0), *look(2, 0)])
    site.add_day(DAYS[1], [*look(1, 1)])
    site.add_day(DAYS[2], [*look(3, 2)])
    [manifest] = site.embed([DAYS[2]])
    assert set(site.rows(DAYS[2])) == {1, 3}
    assert manifest["counts"]["without_actions"] == 0
    assert site.num_actions(DAYS[2])[1] == 1  # of the two actions, one is in the window


# --- errors -----------------------------------------------------------------------------------------


def test_a_gap_is_an_error_with_both_ways_out(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:1])
    with pytest.raises(PipelineError, match=r"builds on 2026-01-03, which is missing") as error:
        site.embed(DAYS[3:])
    assert "--partition-range 2026-01-02...2026-01-04" in str(error.value)
    assert '{"ops": {"user_embeddings": {"config": {"everyone": true}}}}' in str(error.value)
    [manifest] = site.embed(DAYS[3:], everyone=True)
    assert manifest["mode"] == "everyone"


def test_stale_timelines_are_refused(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:2])
    site.small.write_log(DAYS[1], look(4, 1))
    site.small.ingest([DAYS[1]])
    with pytest.raises(
        PipelineError, match=r"changed after user_timelines 2026-01-02 .*; rebuild .*2026-01-02\.\.\.2026-01-04"
    ):
        site.embed([DAYS[1]])


def test_timelines_that_change_meanwhile_are_noticed(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    served = site.make_model("one")
    before = site.embed(DAYS[:2])[1]

    class Meddling(LocalEngine):
        def map_buckets(self, *arguments: Any) -> Iterator[Any]:
            yield from super().map_buckets(*arguments)
            site.small.build([DAYS[1]], rebuild=True)

    engine = Meddling(num_workers=1, memory_mb=64, temp_dir=site.root / "tmp")
    with pytest.raises(
        PipelineError, match=r"was rebuilt while its users were embedded; re-run: dagster asset materialize"
    ):
        site.embed([DAYS[1]], model=lambda ds: served, engine=engine)
    assert site.state.require(DAYS[1]) == before


def test_a_day_is_not_ingested_while_its_users_are_embedded(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    served, refusals = site.make_model("one"), []

    class Meddling(LocalEngine):
        def map_buckets(self, *arguments: Any) -> Iterator[Any]:
            yield from super().map_buckets(*arguments)
            site.small.write_log(DAYS[0], look(4, 1))
            with pytest.raises(PipelineError) as refused:
                site.small.ingest([DAYS[0]])
            refusals.append(str(refused.value))

    engine = Meddling(num_workers=1, memory_mb=64, temp_dir=site.root / "tmp")
    site.embed([DAYS[0]], model=lambda ds: served, engine=engine)
    assert "another run is writing raw_actions 2026-01-01 or relying on it" in refusals[0]


def test_missing_inputs_are_named(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site()
    with pytest.raises(PipelineError, match="user_timelines has no partition 2026-01-01"):
        site.embed(DAYS[:1])
    site.add_day(DAYS[0], look(1, 0))
    nowhere = ServedModel(model_version="lost", path=site.root / "nowhere")
    with pytest.raises(
        PipelineError,
        match=r"no model lost in .*; train one with: dagster asset materialize --select pinnerformer_model",
    ):
        site.embed(DAYS[:1], model=lambda ds: nowhere)
    other = site.make_model("wide", feature_dim=FEATURE_DIM + 1)
    with pytest.raises(PipelineError, match=r"reads pin features of 7 numbers, pin_features 2026-01-01 has 6"):
        site.embed(DAYS[:1], model=lambda ds: other)
    assert site.state.days() == []


def test_a_model_that_gives_nonsense_publishes_nothing(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:1])
    before = site.state.require(DAYS[0]), site.rows(DAYS[0])
    broken = site.make_model("broken", is_broken=True)
    for days in (DAYS[:1], DAYS[1:2]):
        with pytest.raises(PipelineError, match=r"not of unit length; .* nothing was published"):
            site.embed(days, model=lambda ds: broken)
    assert site.state.days() == DAYS[:1]
    assert (site.state.require(DAYS[0]), site.rows(DAYS[0])) == before


def test_too_few_active_users_with_an_embedding_publish_nothing(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site(serving={"quality": {"min_active_coverage": 0.75}})
    rows = [*look(1, 0), *look(2, 0), *look(3, 0), *look(4, 0, pin="unknown")]
    site.add_day(DAYS[0], rows)
    [manifest] = site.embed(DAYS[:1])  # 3 of 4 is enough
    counts = manifest["counts"]
    assert (counts["users"], counts["active_users"], counts["without_actions"], counts["no_feature"]) == (3, 4, 1, 1)
    site.add_day(DAYS[1], [*look(2, 1), *look(5, 1, pin="unknown")])
    with pytest.raises(PipelineError, match=r"only 1 of the 2 users who were to be embedded .* requires 75%"):
        site.embed([DAYS[1]])
    assert site.state.days() == DAYS[:1]


def test_words_that_the_model_does_not_know_are_counted(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site()
    site.add_day(DAYS[0], [*look(1, 0, num=3), (1, "p1", 500.0, "save"), (2, "p2", 600.0, "look")])
    served = site.make_model("plain", words=["click", "closeup"])
    [manifest] = site.embed(DAYS[:1], model=lambda ds: served)
    assert manifest["counts"]["unknown_word"] == 1
    assert site.num_actions(DAYS[0]) == {1: 3, 2: 1}


@pytest.mark.parametrize("everyone", [False, True])
def test_only_the_newest_actions_are_read_and_older_ones_where_these_are_unusable(
    daily_site: Callable[..., DailySite], everyone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = choose("tiny", {}).model.sequence_length
    calls: list[dict[str, Any]] = []
    read = StoredTimelines.read

    def noted(*arguments: Any, **options: Any) -> pa.Table:
        calls.append(options)
        return read(*arguments, **options)

    monkeypatch.setattr(StoredTimelines, "read", noted)
    rows = []
    for segment_actions in (3, 10_000):
        timelines = {"num_buckets": 1, "segment_actions": segment_actions}
        site = daily_site(timelines=timelines, serving={"seen_size": 0})
        site.add_day(DAYS[0], [row for user in range(4) for row in look(user, 0, num=length + user)])
        site.add_day(DAYS[1], [*look(0, 1, num=2), *look(1, 1, num=length - 1), *look(2, 1, num=length, pin="unknown")])
        site.embed(DAYS[:2], everyone=everyone)
        rows.append([site.rows(ds) for ds in DAYS[:2]])
        assert site.num_actions(DAYS[1]) == dict.fromkeys(range(3), length)
    assert rows[0] == rows[1]
    whole = [options["user_ids"].to_pylist() for options in calls if "newest" not in options]
    assert whole == [[2], [2]]  # once in each of the two layouts
    assert {options.get("newest") for options in calls} == {length, None}


def test_the_pins_of_an_action_are_looked_up_once_where_others_are_unusable(
    daily_site: Callable[..., DailySite], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = choose("tiny", {}).model.sequence_length
    num_looked_up: list[int] = []

    def noted(ids: Path, pin_ids: pa.Array) -> np.ndarray:
        num_looked_up.append(len(pin_ids))
        return find_pins(ids, pin_ids)

    monkeypatch.setattr("pf_core.embeddings.inference.find_pins", noted)
    site = daily_site(timelines={"num_buckets": 1})
    unusable = [(3, "unknown", 5000.0, "look")]
    site.add_day(
        DAYS[0], [*look(1, 0, num=length), *look(2, 0, num=length + 3), *look(3, 0, num=length + 1), *unusable]
    )
    [manifest] = site.embed(DAYS[:1])
    assert num_looked_up == [3 * length, (length + 1) + 1]  # the newest of three users, then all actions of user 3
    assert site.num_actions(DAYS[0]) == dict.fromkeys((1, 2, 3), length)
    assert manifest["counts"]["no_feature"] == 1


def test_tasks_carry_no_secret_of_the_site_file(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    store = StoreConfig(kind="redis", url="redis://:swordfish@localhost:6379/0")
    site.site = site.site.model_copy(update={"serving": ServingConfig(store=store)})
    tasks: list[Any] = []

    class Spy(LocalEngine):
        def map_buckets(self, function: Any, given: Any, *progress: Any) -> Iterator[Any]:
            tasks.extend(given)
            yield from super().map_buckets(function, given, *progress)

    site.embed(DAYS[:2], engine=Spy(num_workers=1, memory_mb=64, temp_dir=site.root / "tmp"))
    assert len(tasks) >= 2 * 2
    assert b"swordfish" in pickle.dumps(site.site)
    assert b"swordfish" not in pickle.dumps(tasks)


def test_a_day_without_actions_is_an_empty_partition(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site()
    site.add_day(DAYS[0], look(1, 0))
    site.add_day(DAYS[1], [])
    site.add_day(DAYS[2], look(1, 2))
    _, empty, after = site.embed(DAYS[:3])
    assert empty["counts"]["users"] == 0
    assert empty["mean_vector"] is None
    assert site.rows(DAYS[1]) == {}
    assert after["counts"]["users"] == 1


# --- seen pins --------------------------------------------------------------------------------------


def test_seen_pins_are_the_newest_distinct_ones_whether_the_model_reads_them_or_not(
    daily_site: Callable[..., DailySite],
) -> None:
    site = daily_site(serving={"seen_size": 3})
    pins = {1: ["p1", "p2", "p1", "unknown", "p1"], 2: ["p1", "p2", "p3", "p2", "p4"], 3: ["p5"]}
    site.add_day(DAYS[0], [(user, pin, 10.0 * n, "look") for user in pins for n, pin in enumerate(pins[user])])
    site.embed(DAYS[:1])
    assert site.seen(DAYS[0]) == {
        1: (["p1", "unknown", "p2"], True),
        2: (["p4", "p2", "p3"], False),
        3: (["p5"], True),
    }
    assert site.num_actions(DAYS[0]) == {1: 4, 2: 5, 3: 1}


@pytest.mark.parametrize("everyone", [False, True])
def test_the_whole_timeline_decides_which_pins_are_seen(
    daily_site: Callable[..., DailySite], everyone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random logs with repeated pins: lists are those of the whole timelines, for any number of seen pins."""
    length = choose("tiny", {}).model.sequence_length
    rng = np.random.default_rng(3)
    rows = [
        (user, PINS[min(int(pin), 19)], 1.0 + 10 * number, "look")
        for user in range(25)
        for number, pin in enumerate(rng.geometric(0.05 + 0.03 * user, size=int(rng.integers(1, 60))))
    ]
    num_whole: list[int] = []
    read = StoredTimelines.read

    def noted(*arguments: Any, **options: Any) -> pa.Table:
        if "newest" not in options:
            num_whole.append(len(options["user_ids"]))
        return read(*arguments, **options)

    monkeypatch.setattr(StoredTimelines, "read", noted)
    for seen_size in (0, 1, 5, length + 3):
        site = daily_site(timelines={"num_buckets": 1, "segment_actions": 4}, serving={"seen_size": seen_size})
        site.add_day(DAYS[0], rows)
        site.embed(DAYS[:1], everyone=everyone)
        expected = {}
        for user, timeline in site.small.timelines(DAYS[0]).items():
            newest_first = list(dict.fromkeys(pin for _, pin, *_ in reversed(timeline)))
            expected[user] = newest_first[:seen_size], len(newest_first) <= seen_size
        assert site.seen(DAYS[0]) == expected
        assert {is_complete for _, is_complete in expected.values()} == ({False} if seen_size == 0 else {False, True})
    assert 0 < sum(num_whole) < 4 * 25  # only where the newest actions do not decide


def test_integer_pin_ids_are_seen_as_integers(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site(pin_id_type="int")
    site.small.write_log(DAYS[0], [(1, "-7", 0.0, "look"), (1, "9", 1.0, "look"), (1, "-7", 2.0, "look")])
    path = site.root / "pins" / f"{DAYS[0]}.parquet"
    path.parent.mkdir()
    vectors = pa.array([[1.0] * FEATURE_DIM] * 2, pa.list_(pa.float32()))
    pq.write_table(pa.table({"pin": pa.array([9, -7], pa.int64()), "vector": vectors}), path)
    site.small.ingest(DAYS[:1])
    site.build_pins(DAYS[:1])
    site.small.build(DAYS[:1])
    site.embed(DAYS[:1])
    assert site.seen(DAYS[0]) == {1: ([-7, 9], True)}
    assert site.table(DAYS[0]).schema.equals(user_embeddings_schema("int", "int", DIM).append(INPUT_HASH))


def test_the_hash_covers_what_only_the_seen_pins_depend_on(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site()
    log = [*look(1, 0, num=3), *look(2, 0, num=3)]
    site.add_day(DAYS[0], log)
    site.embed(DAYS[:1])
    before = {row["user_id"]: row for row in site.table(DAYS[0]).to_pylist()}
    site.small.write_log(DAYS[0], [*log, (1, "unknown", 500.0, "look")])
    site.small.ingest(DAYS[:1])
    site.small.build(DAYS[:1])
    [manifest] = site.embed(DAYS[:1])
    after = {row["user_id"]: row for row in site.table(DAYS[0]).to_pylist()}
    assert (manifest["counts"]["embedded"], manifest["counts"]["reused"]) == (1, 1)
    assert after[2] == before[2]
    assert after[1]["embedding"] == before[1]["embedding"]
    assert after[1]["seen_pin_id"] == ["unknown", *before[1]["seen_pin_id"]]
    assert after[1]["input_hash"] != before[1]["input_hash"]


def test_another_number_of_seen_pins_embeds_everyone(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:2])
    serving = site.site.serving.model_copy(update={"seen_size": 1})
    site.site = site.site.model_copy(update={"serving": serving})
    manifests = site.embed(DAYS[2:])
    assert [manifest["mode"] for manifest in manifests] == ["everyone", "active"]
    assert manifests[0]["reason"] == "serving.seen_size changed from 256 to 1"
    assert {len(pins) for pins, _ in site.seen(DAYS[2]).values()} == {1}


def test_a_day_of_an_older_layout_is_refused_with_the_command(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:1])
    path = site.state.manifest_path(DAYS[0])
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "layout"}
    path.write_text(json.dumps(older))
    command = (
        r"dagster asset materialize --select user_embeddings,user_embedding_snapshot --partition {} "
        r"--config-json '{{\"ops\": {{\"user_embeddings\": {{\"config\": {{\"everyone\": true}}}}}}}}'"
    )
    with pytest.raises(
        PipelineError, match=f"stored in layout 1, .* layout 2; rebuild it with: {command.format(DAYS[0])}"
    ):
        site.state.require(DAYS[0])
    with pytest.raises(PipelineError, match=f"{DAYS[0]}, on which .* in layout 1, .* {command.format(DAYS[1])}"):
        site.embed(DAYS[1:2])
    [manifest] = site.embed(DAYS[1:2], everyone=True)
    assert len(site.rows(DAYS[1])) == 30
    [again] = site.embed(DAYS[:1])
    assert (again["mode"], again["counts"]["reused"]) == ("everyone", 0)
    assert manifest["layout"] == again["layout"] == 2


# --- running again ----------------------------------------------------------------------------------


def test_running_a_day_again_embeds_nobody(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    before = site.embed(DAYS)
    rows = {ds: site.rows(ds) for ds in DAYS}
    after = site.embed(DAYS)
    assert {ds: site.rows(ds) for ds in DAYS} == rows
    for old, new in zip(before, after, strict=True):
        assert (new["counts"]["embedded"], new["counts"]["reused"]) == (0, old["counts"]["users"])
        assert new["counts"]["actions"] == new["counts"]["padded_actions"] == 0
        assert (new["digest"], new["mean_vector"]) == (old["digest"], old["mean_vector"])


def test_a_late_row_embeds_its_user_alone(daily_site: Callable[..., DailySite]) -> None:
    site, late = four_days(daily_site()), look(6, 1, num=1, pin="p19")
    site.embed(DAYS)
    rows = {ds: site.rows(ds) for ds in DAYS}
    log = [row for user in range(0, 30, 2) for row in look(user, 1, num=2 + len(str(user)))]
    site.small.write_log(DAYS[1], [*log, *late])
    site.small.ingest([DAYS[1]])
    site.small.build(DAYS[1:])
    manifests = site.embed(DAYS[1:])
    assert [manifest["counts"]["embedded"] for manifest in manifests] == [1, 1, 0]  # 6 is not active on day 3
    for ds in DAYS[1:]:
        assert {user for user, row in site.rows(ds).items() if row != rows[ds][user]} <= {6}
    assert site.rows(DAYS[1])[6] != rows[DAYS[1]][6]


def test_a_new_feature_embeds_those_who_saw_its_pin(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site()
    site.add_day(DAYS[0], [*look(1, 0, pin="p1"), *look(2, 0, pin="p2"), *look(3, 0, pin="p1")])
    site.embed(DAYS[:1])
    before = site.rows(DAYS[0])
    site.write_pins(DAYS[0], [pin for pin in PINS if pin != "p1"])
    table = pq.read_table(site.root / "pins" / f"{DAYS[0]}.parquet")
    changed = pa.table({"pin": ["p1"], "vector": pa.array([[9.0] * FEATURE_DIM], pa.list_(pa.float32()))})
    pq.write_table(pa.concat_tables([table, changed]), site.root / "pins" / f"{DAYS[0]}.parquet")
    site.build_pins([DAYS[0]])
    [manifest] = site.embed(DAYS[:1])
    assert (manifest["counts"]["embedded"], manifest["counts"]["reused"]) == (2, 1)
    after = site.rows(DAYS[0])
    assert {user for user in after if after[user][0] != before[user][0]} == {1, 3}


def test_a_days_vectors_of_another_model_are_not_reused(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:1], model="one")
    before = site.rows(DAYS[0])
    [manifest] = site.embed(DAYS[:1], model="two")
    assert manifest["counts"]["reused"] == 0
    assert all(row[0] != before[user][0] for user, row in site.rows(DAYS[0]).items())


def test_forgotten_users_are_not_embedded(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    manifests = site.embed(DAYS[:2])
    site.forget(4, 7)
    again = site.embed(DAYS[:2])  # the timelines still have them
    assert set(site.rows(DAYS[0])) == set(range(30)) - {4, 7}
    assert set(site.rows(DAYS[1])) == {user for user in range(30) if user % 2 == 0} - {4}
    assert again[1]["counts"]["active_users"] == manifests[1]["counts"]["active_users"] - 1
    assert again[1]["counts"]["embedded"] == 0
    assert again[1]["digest"] != manifests[1]["digest"]


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_a_range_equals_its_days_one_by_one(daily_site: Callable[..., DailySite], id_type: str) -> None:
    users = [f"user {number}" for number in range(20)] if id_type == "string" else list(range(20))
    together, singly = (four_days(daily_site(id_type=id_type), users) for _ in range(2))
    together.embed(DAYS)
    for ds in DAYS:
        singly.embed([ds])
    for ds in DAYS:
        assert together.rows(ds) == singly.rows(ds)
        keys = ("mode", "counts", "mean_vector")
        one, other = dict(together.state.require(ds)), dict(singly.state.require(ds))
        assert [one[key] for key in keys] == [other[key] for key in keys]
    assert set(together.rows(DAYS[0])) == set(users)


def test_workers_change_nothing(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site())
    site.embed(DAYS[:2])
    rows = {ds: site.rows(ds) for ds in DAYS[:2]}
    for ds in DAYS[:2]:
        site.state.manifest_path(ds).unlink()
    with LocalEngine(num_workers=2, memory_mb=64, temp_dir=site.root / "tmp") as engine:
        manifests = site.embed(DAYS[:2], engine=engine)
    assert [manifest["counts"]["reused"] for manifest in manifests] == [0, 0]
    assert {ds: site.rows(ds) for ds in DAYS[:2]} == rows


def test_old_days_are_dropped(daily_site: Callable[..., DailySite]) -> None:
    site = four_days(daily_site(serving={"retention_days": 2}))
    with pytest.raises(PipelineError, match=f"dropped in the same run.* begin with {DAYS[2]}"):
        site.embed(DAYS)  # what follows could not read the first of them
    for ds in DAYS:
        site.embed([ds])
    assert site.state.days() == DAYS[2:]
    assert len(site.rows(DAYS[2])) == 10
    with pytest.raises(PipelineError, match=r"older than the 2 days that are kept"):
        site.embed(DAYS[:1])


# --- crashes ----------------------------------------------------------------------------------------

CRASH_OPTIONS: dict[str, Any] = {"timelines": {"num_buckets": 12}}
CRASH = """
import sys
from pathlib import Path
import torch
from tests.embeddings.test_users import CRASH_OPTIONS, DailySite, site_model
torch.set_num_threads(1)
site = DailySite(Path(sys.argv[1]), CRASH_OPTIONS)
site.embed([sys.argv[2]], model=site_model(site, sys.argv[3]))
"""


@pytest.mark.slow
def test_killed_while_embedding(daily_site: Callable[..., DailySite]) -> None:
    site = daily_site(**CRASH_OPTIONS)
    for day, ds in enumerate(DAYS[:2]):
        site.add_day(ds, [row for user in range(300) for row in look(user, day, num=9)])
    site.embed(DAYS[:2])
    old = {ds: site.rows(ds) for ds in DAYS[:2]}
    manifests = {ds: site.state.require(ds) for ds in DAYS[:2]}
    served = site.make_model("two")

    def num_versions() -> int:
        return len(list(site.state.root.glob("bucket-*.lance/_versions/*.manifest")))

    num_kills = 0
    for attempt in range(2):
        before = num_versions()
        arguments = [sys.executable, "-c", CRASH, str(site.root), DAYS[1], served.model_version]
        process = subprocess.Popen(arguments, cwd=REPOSITORY)
        while process.poll() is None:
            if num_versions() >= before + 2 + 4 * attempt:
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.0005)
        num_kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:  # it was faster than the kill
            site.embed([DAYS[1]], model="one")
            manifests[DAYS[1]] = site.state.require(DAYS[1])
        assert {ds: site.state.require(ds) for ds in DAYS[:2]} == manifests
        assert {ds: site.rows(ds) for ds in DAYS[:2]} == old
    assert num_kills >= 1
    [manifest] = site.embed([DAYS[1]], model=lambda ds: served)
    assert manifest["mode"] == "everyone"
    assert manifest["counts"]["embedded"] == 300
    assert all(row[0] != old[DAYS[1]][user][0] for user, row in site.rows(DAYS[1]).items())
    assert num_versions() <= 2 * 12 + 12  # what the killed runs left behind is gone
