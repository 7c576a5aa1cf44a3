"""What a service reads: one complete release at a time, also while others are published."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from pf_core.serving import client as serving_module
from pf_core.serving.client import Release, Serving, UnknownIdError
from pf_core.serving.releases import DESCRIPTION, PublishedReleases, read_published, release_root
from pf_core.serving.rollback import rollback
from tests.support.releases import (
    DIM,
    NUM_PINS,
    day_of,
    make_site,
    publish_day,
    redis_server,
    seen_of,
    vector_of,
    watch,
)

REPOSITORY = Path(__file__).parents[2]
USERS = list(range(60))
DAY = "2026-01-01"
DAYS = ds_range(DAY, shift_ds(DAY, 20))
PINS = [f"pin{number:02d}" for number in range(NUM_PINS)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = make_site(tmp_path)
    publish_day(site, DAY, USERS, version=1)
    return site


@pytest.fixture
def redis_address() -> Iterator[str]:
    with redis_server() as address:
        yield address


def scores(vector: np.ndarray) -> dict[str, float]:
    """Scores of all pins for a vector, computed without the index."""
    return {pin: float(vector.astype(np.float32) @ vector_of(pin, 1).astype(np.float32)) for pin in PINS}


def test_a_user_gets_the_nearest_pins(site: Site) -> None:
    hits = Serving(site).release().recommend(7, k=5)
    expected = sorted(scores(vector_of(7, 1)).items(), key=lambda item: -item[1])[:5]
    assert [hit.pin_id for hit in hits] == [pin for pin, _ in expected]
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert {hit.interest for hit in hits} == {"interest-1"}


@pytest.mark.parametrize("k", [0, -1, 1.5, "3", True, None])
def test_a_k_that_is_no_number_of_pins_is_refused(site: Site, k: Any) -> None:
    release = Serving(site).release()
    calls: list[Callable[[], object]] = [
        lambda: release.recommend(7, k=k),
        lambda: release.recommend(7, k=k, new_only=True),
        lambda: release.similar("pin00", k=k),
        lambda: release.search(vector_of(7, 1)[None], k=k),
        lambda: release.popular(k=k),
    ]
    for call in calls:
        with pytest.raises(PipelineError, match=rf"^k is {k!r}: the number of pins is a whole number from 1$"):
            call()
    three: Any = np.int64(3)
    assert len(release.recommend(7, k=three)) == 3


def exact_release(site: Site) -> Release:
    """The current release, whose graph is searched so widely that it finds what exact search finds."""
    release = Serving(site).release()
    release.index.description["ef"] = 1000
    return release


def test_memory_is_merged_with_the_nearest_pins(tmp_path: Path) -> None:
    nearest = sorted(PINS, key=lambda pin: -scores(vector_of(7, 1))[pin])
    memory = {7: {nearest[-1]: 3.0, "not in the index": 9.0, nearest[1]: 0.25}, 8: {nearest[0]: -5.0}}
    site = make_site(tmp_path)
    publish_day(site, DAY, USERS, version=1, memory=memory)
    release = exact_release(site)
    cosine = scores(vector_of(7, 1))
    expected = {pin: cosine[pin] + memory[7].get(pin, 0.0) for pin in PINS}
    best = sorted(PINS, key=lambda pin: -expected[pin])[:6]
    hits = release.recommend(7, k=6)
    assert [hit.pin_id for hit in hits] == best
    assert best[0] == nearest[-1]
    assert [hit.score for hit in hits] == pytest.approx([expected[pin] for pin in best], abs=1e-6)
    assert [hit.source for hit in hits] == ["memory" if hit.pin_id in memory[7] else "vector" for hit in hits]
    assert sum(hit.source == "memory" for hit in hits) == 2
    everything = [hit.pin_id for hit in release.recommend(7, k=1000)]
    assert sorted(everything) == PINS  # every pin of the index once, and none that is only in memory
    lowest = release.recommend(8, k=1000)[-1]
    assert (lowest.pin_id, lowest.source) == (nearest[0], "memory")


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_only_new_pins(tmp_path: Path, id_type: str) -> None:
    users = [str(user) for user in USERS] if id_type == "string" else USERS
    memory = {users[3]: {"pin00": 1.0}}
    site = make_site(tmp_path, id_type=id_type)
    publish_day(site, DAY, users, version=1, memory=memory)
    release = exact_release(site)
    for user in users:
        seen = {*seen_of(user), *memory.get(user, {})}
        cosine = scores(vector_of(user, 1))
        hits = release.recommend(user, k=5, new_only=True)
        assert [hit.pin_id for hit in hits] == sorted(set(PINS) - seen, key=lambda pin: -cosine[pin])[:5]
        assert {hit.source for hit in hits} == {"vector"}
        assert hits.seen_is_complete == release.recommend(user).seen_is_complete == (len(seen_of(user)) % 2 == 1)
        assert len(release.recommend(user, k=1000, new_only=True)) == len(set(PINS) - seen)


def test_a_release_of_an_older_layout_is_refused_with_the_command(site: Site) -> None:
    path = release_root(site) / "2026-01-01.1" / DESCRIPTION
    manifest = json.loads(path.read_text())
    assert (manifest.pop("layout"), manifest["slices"]) == (2, {"embedding": [0, DIM]})
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        PipelineError,
        match=r"release 2026-01-01\.1 was stored in layout 1, and this version of the code reads layout 2; rebuild it "
        r"with: dagster asset materialize --select release --partition 2026-01-01",
    ):
        Serving(site).release()
    publish_day(site, DAYS[1], USERS, version=2)
    with pytest.raises(PipelineError, match="was stored in layout 1"):
        rollback(site)
    assert Serving(site).release().manifest["release"] == "2026-01-02.1"


def test_a_pin_gets_the_nearest_pins_but_not_itself(site: Site) -> None:
    release = Serving(site).release()
    expected = sorted(scores(vector_of("pin03", 1)).items(), key=lambda item: -item[1])[1:5]
    assert [hit.pin_id for hit in release.similar("pin03", k=4)] == [pin for pin, _ in expected]
    assert sorted(hit.pin_id for hit in release.similar("pin03", k=1000)) == [pin for pin in PINS if pin != "pin03"]


def test_many_vectors_at_once(site: Site) -> None:
    release = Serving(site).release()
    vectors, _ = release.embeddings(USERS)
    assert release.search(vectors, k=3) == [release.recommend(user, k=3) for user in USERS]


def test_users_keep_their_order_and_unknown_ones_are_marked(site: Site) -> None:
    release = Serving(site).release()
    vectors, is_found = release.embeddings([5, 999, 4])
    assert is_found.tolist() == [True, False, True]
    np.testing.assert_array_equal(vectors[2], vector_of(4, 1).astype(np.float32))
    assert np.isnan(vectors[1]).all()
    assert release.computed_ds(pa.array([5, 999])) == [day_of(5).isoformat(), None]


def test_unknown_ids_have_an_error_of_their_own(site: Site) -> None:
    release = Serving(site).release()
    with pytest.raises(UnknownIdError, match=r"user 999 is not in release 2026-01-01\.1"):
        release.recommend(999)
    with pytest.raises(UnknownIdError, match="pin 'nothing' is not in the index"):
        release.similar("nothing")


@pytest.mark.parametrize("user", ["five", "5", None, 1.5, 2**70])
def test_an_id_of_another_type_is_a_sentence(site: Site, user: object) -> None:
    with pytest.raises(PipelineError, match="user id"):
        Serving(site).release().embeddings([user])


def test_no_ids_give_no_rows(site: Site) -> None:
    vectors, is_found = Serving(site).release().embeddings([])
    assert (vectors.shape, is_found.shape) == ((0, DIM), (0,))


def test_no_release_yet(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no release yet; build everything until one with: pf run; or publish one"):
        Serving(make_site(tmp_path)).release()


def test_the_same_release_is_opened_once(site: Site) -> None:
    serving = Serving(site)
    release = serving.release()
    assert serving.release() is release
    assert release.index is release.index
    publish_day(site, DAYS[1], USERS, version=2)
    assert serving.release().manifest["release"] == "2026-01-02.1"
    rollback(site)
    assert serving.release().manifest["release"] == "2026-01-01.1"


def test_a_release_removed_before_it_could_be_opened_is_no_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [PublishedReleases(current="2025-12-31.1")]

    def late(site: Site) -> PublishedReleases:
        if not answers:
            return read_published(site)
        publish_day(site, DAYS[1], USERS, version=2)
        return answers.pop()

    monkeypatch.setattr(serving_module, "read_published", late)
    assert Serving(site).release().manifest["release"] == "2026-01-02.1"


def test_a_current_release_that_is_gone_is_an_error(site: Site) -> None:
    shutil.rmtree(release_root(site) / "2026-01-01.1")
    with pytest.raises(PipelineError, match=r"the current release 2026-01-01\.1 is gone"):
        Serving(site).release()


BUILDS_ONLY = ("torch", "duckdb", "scipy", "lance", "dagster", "mlflow", "s3fs", "pyspark", "redis", "pandas")


def test_a_service_imports_nothing_that_only_builds(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(make_site(tmp_path).model_dump_json())
    code = (
        "import sys, pathlib, pf_core.serving.client\n"
        "from pf_core.config.site import load_site\n"
        f"site = load_site(pathlib.Path({str(tmp_path / 'site.yaml')!r}), environment={{}})\n"
        "pf_core.serving.client.Serving(site)\n"
        f"print([name for name in {BUILDS_ONLY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=True)
    assert result.stdout == "[]\n"


READER = """
import sys
from pathlib import Path
from tests.support.releases import make_site, watch

root = Path(sys.argv[1])
print("ready", flush=True)
seen = watch(make_site(root / "site"), range(60), range(22), (root / "over").exists)
print(len(seen), flush=True)
"""


def test_readers_see_only_whole_releases_while_twenty_are_published(tmp_path: Path) -> None:
    """Threads of this process and another process read all the time; one rollback among the publications."""
    site = make_site(tmp_path / "site", keep_releases=2)
    publish_day(site, DAYS[0], USERS, version=0)
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    seen = _publish_and_watch(site, tmp_path / "over")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert int(output) >= 5
    assert all(len(releases) >= 5 for releases in seen)
    publish_day(site, shift_ds(DAYS[-1], 1), USERS, version=21)  # the readers have ended
    assert len([path for path in release_root(site).iterdir() if path.is_dir()]) == 2


def test_readers_of_redis_see_only_whole_releases(tmp_path: Path, redis_address: str) -> None:
    site = make_site(tmp_path / "site", keep_releases=2, store={"kind": "redis", "url": redis_address})
    publish_day(site, DAYS[0], USERS, version=0)
    assert all(len(releases) >= 3 for releases in _publish_and_watch(site, tmp_path / "over", num_days=8))


def _publish_and_watch(site: Site, over: Path, num_days: int = 20) -> list[set[str]]:
    """Publish days, with a rollback in the middle; returns the releases that each reading thread saw."""
    seen: list[set[str]] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            seen.append(watch(site, USERS, range(22), over.exists))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for version, ds in enumerate(DAYS[1 : 1 + num_days], start=1):
            publish_day(site, ds, USERS, version)
            if version == num_days // 2:
                rollback(site)
    finally:
        over.touch()
        for thread in threads:
            thread.join()
    assert errors == []
    return seen


@pytest.mark.parametrize("other", ["pin\ud800", None, 1.0, True, 2**70, [1], b"pin01"])
def test_ids_of_other_types_are_refused(tmp_path: Path, other: object) -> None:
    """A service passes what it is asked for: that is never somebody else, and never a traceback of a library."""
    site = make_site(tmp_path)
    publish_day(site, DAY, [1, 2], 1)
    release = Serving(site).release()
    with pytest.raises(PipelineError):
        release.recommend(other)  # type: ignore[arg-type]
    with pytest.raises(PipelineError):
        release.similar(other)  # type: ignore[arg-type]
