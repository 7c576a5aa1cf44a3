"""What `pf check` foresees equals what the pipeline makes of the same log."""

from typing import Any

import pytest

from pf_core.config.site import Site
from pf_core.config.training import auto
from pf_core.config.training_section import TrainingConfig, UsersConfig
from pf_core.logs.partition import read_manifest
from pf_core.logs.training_users import read_training_users
from pf_core.onboarding import forecast
from pf_core.onboarding.forecast import (
    KnownPins,
    describe_embedded,
    describe_training,
    foresee_training,
    minutes_text,
    read_pins,
    seconds_of,
)
from pf_core.onboarding.survey import describe_days, survey_log
from pf_core.pins.features import pin_state
from pf_core.timelines.build import timeline_state
from pf_core.training.parts import rows
from pf_core.training.plan import resolve_config
from pf_core.training.training_set import latest_training_set, read_training_set_manifest
from tests.support.shared import SharedSites
from tests.support.tiny_world import make_tiny_site


@pytest.fixture(scope="module")
def site(shared_sites: SharedSites) -> Site:
    """A tiny world with defects in its log, and everything up to the training set."""
    return shared_sites.get("tiny-world", make_tiny_site)


def with_auto(site: Site, **changes: Any) -> Site:
    training = TrainingConfig(
        evaluation_days=site.training.evaluation_days, held_out_share=site.training.held_out_share, **changes
    )
    return site.model_copy(update={"training": training})


def test_rows_users_and_pins_are_those_of_a_run(site: Site) -> None:
    survey, last = survey_log(site), site.end_ds
    days = [
        manifest for ds in sorted(survey.actions.rows_by_day()) if (manifest := read_manifest(site, ds)) is not None
    ]
    assert survey.plan.is_whole
    assert survey.actions.num_actions == sum(manifest["counts"]["kept"] for manifest in days)
    assert survey.num_duplicates == sum(manifest["counts"]["duplicates"] for manifest in days) > 0
    assert survey.tally.num_rejected > 0
    assert survey.actions.num_users == timeline_state(site).require(str(last))["counts"]["users"]
    assert "none without rows" in describe_days(site, survey)


def test_the_selected_users_alone_are_learned_from(site: Site) -> None:
    survey = survey_log(site)
    known = read_pins(site, survey.actions)
    chosen = with_auto(site, users=UsersConfig(share=0.5))
    everybody, found = foresee_training(with_auto(site), survey, known), foresee_training(chosen, survey, known)
    assert everybody is not None
    assert found is not None
    users = read_training_users(chosen)
    num_selected = int(users.are_selected(survey.actions.user).sum())
    assert 0 < found.num_users < everybody.num_users
    assert found.num_users <= int(users.may_train(survey.actions.user).sum()) < num_selected
    embedded = describe_embedded(chosen, survey, known)[0]
    assert f"users: {survey.actions.num_users:,}, all" in embedded  # everybody is embedded
    assert f"; training.users selects {num_selected:,} of them to learn from" in embedded
    assert "training.users" not in describe_embedded(site, survey, known)[0]


def test_the_training_is_the_one_that_the_training_set_gives(site: Site) -> None:
    survey = survey_log(site)
    known = read_pins(site, survey.actions)
    assert isinstance(known, KnownPins)
    found = foresee_training(with_auto(site), survey, known)
    path = latest_training_set(site)
    manifest = read_training_set_manifest(path)
    config, chosen = resolve_config(path, "auto", {})
    assert found is not None
    assert found.cut_ds == manifest["cut_ds"]
    assert (found.num_users, found.num_actions) == (
        manifest["counts"]["train"]["users"],
        manifest["counts"]["train"]["actions"],
    )
    factor_dim = {"parts.factor_dim"}  # the catalogue is dated, and only its first day was read
    assert [choice for choice in found.chosen if choice["setting"] not in factor_dim] == [
        choice for choice in chosen if choice["setting"] not in factor_dim
    ]
    assert found.config.parts is not None
    assert config.parts is not None
    assert found.config.parts.memory == config.parts.memory


def test_changes_of_the_site_file_count(site: Site) -> None:
    survey = survey_log(site)
    lines = describe_training(with_auto(site, changes={"parts": {"memory": False}}), survey, None)
    assert any(line.startswith("memory off: training.changes; auto would choose True") for line in lines)
    assert describe_training(site, survey, None) == [
        "preset tiny: its settings do not depend on the log (pf_core/config/training.py)"
    ]


def test_the_pins_of_the_files_are_counted(site: Site) -> None:
    survey = survey_log(site)
    known = read_pins(site, survey.actions)
    assert isinstance(known, KnownPins)
    users, pins = describe_embedded(with_auto(site), survey, known)
    assert users.startswith(f"users: {survey.actions.num_users:,}, all with an action until {site.end_ds}")
    assert "`on_homefeed` does not say that they may be recommended" in pins
    assert known.dim > 0
    assert 0 < known.num_candidates <= known.num <= pin_state(site).require(str(site.end_ds))["counts"]["pins"]


def test_large_files_of_pins_are_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "MAX_PIN_BYTES", 10)
    found = read_pins(site, survey_log(site).actions)
    assert isinstance(found, str)
    assert found.endswith("and were not read")


def test_the_time_is_near_what_was_measured() -> None:
    """The five trainings of docs/quality.md: seconds, pins, actions."""
    measured = [(33.5, 7583, 99_516), (53.7, 12_273, 121_559), (73.9, 46_933, 2_012_535), (85.1, 38_212, 2_172_701)]
    measured.append((103.4, 92_334, 1_232_993))
    for seconds, num_pins, num_actions in measured:
        assert 0.75 < seconds_of(auto(), num_pins=num_pins, num_actions=num_actions) / seconds < 1.25
    half = auto().model_copy(update={"optimizer": auto().optimizer.model_copy(update={"num_steps": 100})})
    assert seconds_of(half, num_pins=0, num_actions=0) == seconds_of(auto(), num_pins=0, num_actions=0) / 2


def test_a_day_of_training_needs_as_many_users_as_in_training() -> None:
    assert forecast.MIN_ROWS == rows.MIN_ROWS


@pytest.mark.parametrize(
    ("seconds", "text"), [(20, "a minute"), (95, "1.6 minutes"), (600, "10 minutes"), (9000, "2.5 hours")]
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert minutes_text(seconds) == text
