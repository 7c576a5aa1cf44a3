"""`training.users`: who may be learned from. Nothing that a model learns depends on the others, who are embedded."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pf_assets.metadata.model import describe_training_set
from pf_core.benchmark.reading import read_log
from pf_core.benchmark.stages import benchmark_site, ingest_log
from pf_core.config.site import Site, load_site
from pf_core.config.training_section import AnswerColumn, TrainingConfig, UsersConfig
from pf_core.days import ds_range
from pf_core.embeddings.tables import snapshot_state
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.evaluation.question import open_question
from pf_core.hashing import hashed_uniform, is_held_out
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.training_users import SELECTION_KEY, TrainingUsers, read_training_users
from pf_core.pins import counts
from pf_core.pins.features import build_pin_features
from pf_core.serving.client import Serving
from pf_core.timelines.build import build_timelines
from pf_core.training import build_set, packing
from pf_core.training.build_set import build_training_set
from pf_core.training.checks import judge_held_out_users
from pf_core.training.plan import plan_model
from pf_core.training.trainer import train
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.daily import NUM_USERS
from tests.support.documents import blocks
from tests.support.parts_shop import Silent, silent
from tests.support.shop import CUT_DS, DAYS, HELD_OUT_SHARE, shop_actions, shop_file, without_vectors
from tests.support.stages import BUILT, make_staged_site, run_stages

FEW_STEPS = {"optimizer": {"num_steps": 4, "warmup_steps": 2}, "batch_users": 32, "evaluate_every": 2}


class Row(NamedTuple):
    user: int
    pin: str
    ds: str
    second: int
    kind: str = "buy"


def all_rows() -> list[Row]:
    """The shop's actions. Every user has pins of their own, with a kind of their own, and an action before others."""
    rows = [Row(*row) for row in shop_actions()]
    users = sorted({row.user for row in rows})
    own = [Row(user, f"own{user:02d}", DAYS[1], 80_000 + user, f"kind{user:02d}") for user in users]
    return [*rows, *own, *(Row(user, "p00", DAYS[0], 60 * user) for user in users)]


USERS = pa.array(sorted({row.user for row in all_rows()}))
HELD_OUT = set(USERS.filter(pa.array(is_held_out(USERS, HELD_OUT_SHARE))).to_pylist())
CONSENTED = {user for user in USERS.to_pylist() if user % 3 != 1}
OTHERS = set(USERS.to_pylist()) - CONSENTED


def write_site(root: Path, rows: Sequence[Row], users: dict[str, Any] | None) -> Site:
    """The log of some rows in one file, with a column that says who consented; a list of them is beside it."""
    root.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{user},{pin},{ds}T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z,{kind},"
        f"{'yes' if user in CONSENTED else 'no'}\n"
        for user, pin, ds, second, kind in rows
    ]
    (root / "actions.csv").write_text("user,pin,at,kind,consent\n" + "".join(lines))
    (root / "consent.txt").write_text("".join(f"{user}\n" for user in sorted(CONSENTED)))
    (root / "forget.jsonl").touch()
    chosen = without_vectors(root, changes=FEW_STEPS, users=users)
    actions = {**chosen["source"]["actions"], "action_type": "kind"}
    positive = {"action_types": ["buy", *(f"kind{user:02d}" for user in USERS.to_pylist())], "longer_than_s": {}}
    source = {**chosen["source"], "actions": actions, "positive": positive}
    changes = {"source": source, "deletion_list": str(root / "forget.jsonl")}
    return Site.model_validate(shop_file(root) | chosen | changes)


def listed(root: Path) -> dict[str, Any]:
    return {"file": str(root / "consent.txt")}


def answered(root: Path) -> dict[str, Any]:
    return {"column": "consent", "values": ["yes"]}


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {"file": listed, "column": answered}


def prepare(site: Site, root: Path) -> LocalEngine:
    engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=root / "tmp")
    ingest_log(site, engine=engine, progress=silent)
    days = ds_range(CUT_DS, CUT_DS)
    list(build_timelines(site, days, rebuild=True, engine=engine, progress=silent))
    list(build_pin_features(site, days, engine=engine, progress=silent))
    return engine


def digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files below some folders."""
    files = [path for name in names for path in sorted((folder / name).rglob("*")) if path.is_file()]
    assert files
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def learned(root: Path, rows: Sequence[Row], way: str) -> dict[str, Any]:
    """All that a model is made of, and the model: training rows, words, pins, counts, factors, weights, choices."""
    site = write_site(root, rows, WAYS[way](root))
    engine = prepare(site, root)
    build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
    plan = plan_model(site)
    data = open_training_set(plan.training_set)
    train(plan.config, training_set=plan.training_set, run_dir=plan.run_dir, num_workers=0, observer=Silent())
    model = digests(plan.run_dir, ["model"])
    return {
        "files": digests(data.path, ["train", "pins", "uses"]),
        "words": data.manifest["vocabularies"],
        "origin": data.manifest["time_origin_us"],
        "train": data.manifest["counts"]["train"],
        "chosen": plan.chosen,
        "model": {name: digest for name, digest in model.items() if not name.endswith(".json")},
        "fingerprint": data.fingerprint,
        "name": plan.model_version,
    }


def without(rows: Sequence[Row], users: set[int]) -> list[Row]:
    return [row for row in rows if row.user not in users]


def altered(rows: Sequence[Row], users: set[int]) -> list[Row]:
    """Other pins, days and kinds of actions for these users, and pins that nobody else has."""
    changed = [
        row._replace(pin=f"new{number % 7}", ds=DAYS[number % len(DAYS)], kind="return") if row.user in users else row
        for number, row in enumerate(rows)
    ]
    return [*changed, *(Row(user, "p01", DAYS[0], 1) for user in users)]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {way: learned(tmp_path_factory.mktemp(way), all_rows(), way) for way in WAYS}


def test_a_file_and_a_column_of_the_same_users_teach_the_same(unchanged: dict[str, dict[str, Any]]) -> None:
    for name in unchanged["file"].keys() - {"fingerprint", "name"}:
        assert unchanged["file"][name] == unchanged["column"][name], name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [without, altered])
def test_nothing_that_a_model_learns_depends_on_the_others(
    tmp_path: Path,
    unchanged: dict[str, dict[str, Any]],
    change: Callable[[Sequence[Row], set[int]], list[Row]],
    way: str,
) -> None:
    """Not a bit differs, not even the name of the model, if those change whom no split has. Those who are held out
    are in the set to judge models, and so in its fingerprint, and change no bit of what is learned either."""
    assert learned(tmp_path / "neither", change(all_rows(), OTHERS - HELD_OUT), way) == unchanged[way]
    all_others = learned(tmp_path / "all", change(all_rows(), OTHERS), way)
    assert all_others["fingerprint"] != unchanged[way]["fingerprint"]
    for name in all_others.keys() - {"fingerprint", "name"}:
        assert all_others[name] == unchanged[way][name], name


def _count_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    original = counts.counts_of_days

    def counted(site: Site, days: Any, users: TrainingUsers) -> Any:
        return original(site, days, replace(users, listed=None))

    monkeypatch.setattr(build_set, "counts_of_days", counted)


def _keep_every_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_set, "pins_of_training_users", lambda *arguments, **options: None)


def _train_on_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing._pack_bucket

    def packed(task: Any) -> Any:
        return original(replace(task, users=replace(task.users, listed=None)))

    monkeypatch.setattr(packing, "_pack_bucket", packed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("leak", "where"),
    [
        (_count_everybody, "uses/pin.npy"),
        (_keep_every_pin, "pins/pin_id.arrow"),
        (_train_on_everybody, "train/pin.npy"),
    ],
)
def test_a_planted_leak_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak: Callable[[pytest.MonkeyPatch], None], where: str, way: str
) -> None:
    leak(monkeypatch)
    before = learned(tmp_path / "before", all_rows(), way)
    after = learned(tmp_path / "after", without(all_rows(), OTHERS - HELD_OUT), way)
    assert before["files"][where] != after["files"][where]
    assert before["model"] != after["model"]


def test_the_set_has_those_who_are_selected_and_says_how_many(tmp_path: Path) -> None:
    site = write_site(tmp_path, all_rows(), listed(tmp_path))
    said: list[str] = []
    engine = prepare(site, tmp_path)
    manifest = build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=said.append)
    data = open_training_set(latest_training_set(site))
    assert set(data.train.user_ids().to_pylist()) == CONSENTED - HELD_OUT
    assert set(data.held_out.user_ids().to_pylist()) == HELD_OUT
    assert data.action_types == sorted(["buy", *(f"kind{user:02d}" for user in CONSENTED - HELD_OUT)])
    held_out = len(OTHERS & HELD_OUT)
    assert held_out > 0
    assert manifest["counts"]["selection"] == {
        "selected": len(CONSENTED),
        "others": len(OTHERS),
        "held_out_others": held_out,
    }
    assert manifest["users"]["listed"] == len(CONSENTED)
    assert manifest["counts"]["users_left_out"] == 0
    assert (
        f"training_set: training.users selects {len(CONSENTED)} of {len(USERS)} users; of the others, {held_out} are "
        "held out, and judge models like other held-out users"
    ) in said
    page = describe_training_set(data.path, manifest)
    shown = (page["users_selected"], page["users_others"], page["users_held_out_others"])
    assert shown == (len(CONSENTED), len(OTHERS), held_out)
    found = judge_held_out_users(site, data.path)
    assert found.passed, found.reason
    question = open_question(site, data, progress=silent)
    assert set(question.user_ids.to_pylist()) & OTHERS  # everybody may be evaluated
    [revoked, *_] = CONSENTED - HELD_OUT
    (tmp_path / "consent.txt").write_text("".join(f"{user}\n" for user in CONSENTED - {revoked}))
    found = judge_held_out_users(site, data.path)
    assert not found.passed
    assert "training.users does not select 1 training users" in found.reason


def test_the_next_set_follows_the_file_and_the_deletion_list(tmp_path: Path) -> None:
    site = write_site(tmp_path, all_rows(), listed(tmp_path))
    engine = prepare(site, tmp_path)

    def users_of_set() -> tuple[set[int], str]:
        manifest = build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
        data = open_training_set(latest_training_set(site))
        return set(data.train.user_ids().to_pylist()), manifest["fingerprint"]

    first, fingerprint = users_of_set()
    lines = [json.dumps({"user_id": user, "since": "2026"}) for user in sorted(CONSENTED, reverse=True)]
    (tmp_path / "consent.txt").write_text("\n".join([*lines, "", lines[0]]))
    assert users_of_set() == (first, fingerprint)  # the same users, written in another way
    revoked, forgotten, *_ = sorted(first)
    (tmp_path / "consent.txt").write_text("".join(f"{user}\n" for user in CONSENTED - {revoked}))
    second, changed = users_of_set()
    assert second == first - {revoked}
    assert changed != fingerprint
    (tmp_path / "forget.jsonl").write_text(f"{forgotten}\n")
    assert users_of_set()[0] == first - {revoked, forgotten}
    (tmp_path / "consent.txt").write_text("".join(f"{user}\n" for user in [*CONSENTED, 123_456]))
    said: list[str] = []
    build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=said.append)
    assert any("; 2 ids of the file have no timeline" in line for line in said)  # 123456, and the forgotten user


def test_the_choice_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """A choice of everybody is not the same as no choice: what it leaves out may be nothing today."""
    site = write_site(tmp_path, all_rows(), None)
    engine = prepare(site, tmp_path)
    fingerprints = []
    for users in (None, {"share": 1.0}, {"share": 0.5}):
        chosen = None if users is None else UsersConfig.model_validate(users)
        site = site.model_copy(update={"training": site.training.model_copy(update={"users": chosen})})
        manifest = build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
        fingerprints.append(manifest["fingerprint"])
        assert ("users" in manifest, "selection" in manifest["counts"]) == (users is not None,) * 2
    assert len(set(fingerprints)) == 3


# Shares


def test_a_share_is_nested_and_independent_of_held_out_users() -> None:
    """Of 20,000 users a share has its number, within 4 standard deviations, and so have both hashes together."""
    users = pa.array(range(20_000))
    by_share = {share: TrainingUsers(held_out_share=0.1, share=share).are_selected(users) for share in (0.3, 0.5, 1.0)}
    assert by_share[1.0].all()
    assert not (by_share[0.3] & ~by_share[0.5]).any()
    held_out = is_held_out(users, 0.1)
    for is_chosen, share in ((by_share[0.3], 0.3), (by_share[0.3] & held_out, 0.03)):
        assert abs(is_chosen.sum() - 20_000 * share) < 4 * np.sqrt(20_000 * share * (1 - share))
    assert (TrainingUsers(held_out_share=0.1, share=0.3).may_train(users) == by_share[0.3] & ~held_out).all()


@given(st.one_of(st.lists(st.text(max_size=3)), st.lists(st.integers(-(2**63), 2**63 - 1))), st.data())
def test_a_choice_is_that_of_each_id(ids: list[Any], data: st.DataObject) -> None:
    """A list and a share, of text and numbers, repeated and in any order, against a set in Python."""
    kind = pa.string() if ids and isinstance(ids[0], str) else pa.int64()
    users = pa.array(ids, kind)
    chosen = data.draw(st.lists(st.sampled_from(ids), min_size=1)) if ids else [pa.scalar(0, kind).as_py()]
    for extra in ([], ids):  # a list that is longer than the ids, and a shorter one
        listed_ids = pa.array(sorted({*chosen, *extra}), kind)
        found = TrainingUsers(held_out_share=0, listed=listed_ids).are_selected(users)
        assert found.tolist() == [user in {*chosen, *extra} for user in ids]
    found = TrainingUsers(held_out_share=0, share=0.4).are_selected(users)
    one_by_one = [bool(hashed_uniform(pa.array([user], kind), SELECTION_KEY)[0] < 0.4) for user in ids]
    assert found.tolist() == one_by_one


# Counts in serving, and the whole pipeline


def test_a_day_is_counted_again_for_another_choice(tmp_path: Path) -> None:
    site = write_site(tmp_path, [Row(user, "p00", DAYS[0], user) for user in USERS.to_pylist()], listed(tmp_path))
    prepare_only_logs = LocalEngine(num_workers=1, memory_mb=64, temp_dir=tmp_path / "tmp")
    ingest_log(site.model_copy(update={"end_ds": DAYS[0]}), engine=prepare_only_logs, progress=silent)

    def user_days() -> list[int]:
        return counts.counts_as_of(site, DAYS[0]).user_days_NW[:, 0].tolist()

    assert user_days() == [len(CONSENTED - HELD_OUT)]
    [first, *_] = CONSENTED - HELD_OUT
    (tmp_path / "consent.txt").write_text(f"{first}\n")
    assert user_days() == [1]
    site = site.model_copy(update={"training": site.training.model_copy(update={"users": None})})
    assert user_days() == [len(USERS) - len(HELD_OUT)]


def test_everybody_is_embedded_and_released(tmp_path: Path) -> None:
    """Through all stages: the model has seen a share of the users, and each of them has a vector."""
    site = make_staged_site(tmp_path)
    users = UsersConfig(share=0.4)
    site = run_stages(site.model_copy(update={"training": site.training.model_copy(update={"users": users})}))
    data = open_training_set(latest_training_set(site))
    everybody = pa.array(range(NUM_USERS))
    selected = set(everybody.filter(pa.array(read_training_users(site).may_train(everybody))).to_pylist())
    trained = set(data.train.user_ids().to_pylist())
    assert trained
    assert trained <= selected
    with snapshot_state(site).held(BUILT[-1]) as snapshot:
        tables = [dataset.to_table(columns=["user_id"]) for dataset in snapshot.buckets()]
    released = [user for table in tables for user in table["user_id"].to_pylist()]
    assert len(set(released) - selected - set(data.held_out.user_ids().to_pylist())) > 10  # in neither split
    release = Serving(site).release()
    for user in released:
        assert release.recommend(user, k=3)


@pytest.mark.parametrize("way", WAYS)
def test_contenders_of_a_benchmark_learn_from_the_same_users(tmp_path: Path, way: str) -> None:
    site = write_site(tmp_path, all_rows(), WAYS[way](tmp_path))
    engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=tmp_path / "tmp")
    cached = benchmark_site(site, tmp_path / "cache")
    ingest_log(cached, engine=engine, progress=silent)
    log = read_log(cached, name="shop", cut_ds=CUT_DS, num_days=3, progress=silent)
    assert set(log.train_user_ids.to_pylist()) == CONSENTED - HELD_OUT
    assert set(log.test_user_ids.to_pylist()) & OTHERS
    assert any(
        f"learns from {len(CONSENTED - HELD_OUT)} of the {len(USERS) - len(HELD_OUT)} users" in note
        for note in log.notes
    )
    changed = {"consent.txt": "2\n", "actions.csv": (tmp_path / "actions.csv").read_text().replace("yes", "no")}
    name = {"file": "consent.txt", "column": "actions.csv"}[way]
    (tmp_path / name).write_text(changed[name])
    assert benchmark_site(site, tmp_path / "cache").data_dir != cached.data_dir


def test_the_list_is_made_from_a_column_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet of docs/training.md: the newest row of a user counts, whatever file it is in."""
    (tmp_path / "logs").mkdir()
    header = "user_id,time,consent\n"
    first = "1,2026-01-01T10:00,no\n2,2026-01-01T10:00,yes\n3,2026-01-01T10:00,yes\n4,2026-01-01T10:00,\n"
    (tmp_path / "logs" / "a.csv").write_text(f"{header}{first}5,2026-01-02T10:00,yes\n")
    (tmp_path / "logs" / "b.csv").write_text(f"{header}1,2026-01-02T10:00,yes\n2,2026-01-02T09:00,no\n")
    [snippet] = [block.text for block in blocks("python") if "consent.txt" in block.text]
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", snippet], check=True)
    site = make_staged_site(tmp_path / "site")
    users = UsersConfig(file=str(tmp_path / "consent.txt"))
    chosen = site.model_copy(update={"training": site.training.model_copy(update={"users": users})})
    listed_ids = read_training_users(chosen).listed
    assert listed_ids is not None
    assert listed_ids.to_pylist() == [1, 3, 5]


# Bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"training\.users\.file: no file at .*consent\.txt"),
        ("", r"training\.users\.file: .*consent\.txt names no user, so nobody may be learned from"),
        ("\n\n", r"consent\.txt names no user"),
        ("3\nalice\n", r"training\.users\.file: .*consent\.txt, line 2: 'alice' is not an integer user id"),
        ('{"user_id": "3"}\n', r"training\.users\.file: .*, line 1: .* has no user_id that is an integer of 64 bits"),
        ('{"user": 3}\n', r"training\.users\.file: .*, line 1: .* has no user_id"),
        ('3\n{"user_id": 5', r"training\.users\.file: .*, line 2 is cut off: .*\nwrite the file again|.*cut off.*"),
        (b"\xff\xfe3\n", r"training\.users\.file: .*consent\.txt is not UTF-8 text: line 1"),
    ],
)
def test_a_bad_file_is_a_sentence_with_file_and_line(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    site = write_site(tmp_path, all_rows(), listed(tmp_path))
    path = tmp_path / "consent.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PipelineError, match=message) as error:
        read_training_users(site)
    assert "deletion_list" not in str(error.value).replace("training.users", "")


def test_a_choice_of_nobody_is_refused(tmp_path: Path) -> None:
    site = write_site(tmp_path, all_rows(), listed(tmp_path))
    engine = prepare(site, tmp_path)
    (tmp_path / "consent.txt").write_text("888888\n999999\n")
    with pytest.raises(PipelineError, match=r"none of the 2 users in .*consent.txt, such as 888888, has a timeline"):
        build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
    few = site.training.model_copy(update={"users": UsersConfig(share=1e-9)})
    with pytest.raises(PipelineError, match=r"training.users.share 1e-09 selects no user with a timeline"):
        build_training_set(site.model_copy(update={"training": few}), cut_ds=CUT_DS, engine=engine, progress=silent)
    site = write_site(tmp_path, all_rows(), {"column": "consent", "values": ["agreed", 1]})
    ingest_again(site, engine)
    message = r"as of 2026-01-09, no user .* has one of the values 'agreed', 1 in column 'consent' of the newest row"
    with pytest.raises(PipelineError, match=message):
        build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
    with pytest.raises(PipelineError, match="no training set"):
        latest_training_set(site)


def ingest_again(site: Site, engine: LocalEngine) -> None:
    forgotten = read_deletion_list(site)
    list(ingest_days(site, DAYS, engine=engine, forgotten=forgotten, progress=silent))


def test_a_revoked_consent_leaves_the_next_set_of_the_same_cut(tmp_path: Path) -> None:
    """After the cut one user revokes, and one of the others agrees: the first is left out, the second not added."""
    site = write_site(tmp_path, all_rows(), answered(tmp_path))
    engine = prepare(site, tmp_path)
    build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
    before = set(open_training_set(latest_training_set(site)).train.user_ids().to_pylist())
    assert before == CONSENTED - HELD_OUT
    revoking, agreeing = min(before), min(OTHERS - HELD_OUT)
    with (tmp_path / "actions.csv").open("a") as file:
        file.writelines(
            f"{user},p00,{DAYS[-1]}T23:59:59Z,buy,{said}\n" for user, said in ((revoking, "no"), (agreeing, "yes"))
        )
    ingest_again(site, engine)
    assert not judge_held_out_users(site, latest_training_set(site)).passed
    build_training_set(site, cut_ds=CUT_DS, engine=engine, progress=silent)
    after = set(open_training_set(latest_training_set(site)).train.user_ids().to_pylist())
    assert after == before - {revoking}
    assert judge_held_out_users(site, latest_training_set(site)).passed


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"share": 0}, "training.users.share: Input should be greater than 0"),
        ({"share": 1.5}, "training.users.share: Input should be less than or equal to 1"),
        ({"share": "half"}, "training.users.share: "),
        ({}, "training.users: give exactly one of `share`, `file` and `column`"),
        ({"share": 0.5, "file": "consent.txt"}, "training.users: give exactly one of `share`, `file` and `column`"),
        ({"column": "consent"}, "training.users: `values` is missing"),
        ({"share": 0.5, "values": ["yes"]}, "training.users: `values` are those of a column of the log: name it"),
        ({"column": "consent", "values": []}, "training.users.values: "),
        ({"column": "", "values": ["yes"]}, "training.users.column: "),
        ({"column": "consent", "values": [True, False]}, "training.users: `values` has both true and false"),
        ({"column": "consent", "values": [None]}, "training.users.values.0: None is no text, number, true or false"),
        ({"column": "consent", "values": [["yes"]]}, "training.users.values.0: .*write in quotes what the column has"),
        ({"column": "consent", "values": [""]}, "training.users.values.0: an empty text is a missing value"),
        ({"column": "consent", "values": [2**60]}, "training.users.values.0: 1152921504606846976 is no number"),
        ({"column": "consent", "values": "yes"}, "training.users.values: "),
        ({"fiel": "consent.txt"}, "training.users.fiel: is not a known key"),
        (0.3, "training.users: "),
    ],
)
def test_a_bad_choice_is_refused_with_its_key(tmp_path: Path, users: Any, message: str) -> None:
    content = shop_file(tmp_path)
    content["training"] = {**content["training"], "users": users}
    (tmp_path / "site.yaml").write_text(json.dumps(content))
    with pytest.raises(PipelineError, match=message.replace("`", ".")):
        load_site(tmp_path / "site.yaml", environment={})


def test_yes_needs_no_quotes(tmp_path: Path) -> None:
    content = shop_file(tmp_path)
    content["source"]["actions"] |= {"columns": ["user", "pin", "at"]}
    del content["training"]
    users = "\ntraining: {users: {column: consent, values: [yes, agreed, 1]}}\n"
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content) + users)
    with pytest.raises(PipelineError, match=r"columns. does not name 'consent', which .training.users.column. reads"):
        load_site(tmp_path / "site.yaml", environment={})
    del content["source"]["actions"]["columns"]
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content) + users)
    site = load_site(tmp_path / "site.yaml", environment={})
    assert site.answers == AnswerColumn(column="consent", values=(True, "agreed", 1))
    without_users = site.model_copy(update={"training": TrainingConfig()})
    assert site.fingerprint() != without_users.fingerprint()  # the data assets have the answers


def test_a_file_is_relative_to_the_site_file(tmp_path: Path) -> None:
    content = shop_file(tmp_path)
    content["training"] = {**content["training"], "users": {"file": "lists/consent.txt"}}
    (tmp_path / "site.yaml").write_text(json.dumps(content))
    site = load_site(tmp_path / "site.yaml", environment={})
    assert site.training.users == UsersConfig(file=str(tmp_path / "lists" / "consent.txt"))
    assert TrainingConfig().users is None
