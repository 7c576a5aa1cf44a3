"""Cron expressions of the site file: what is accepted has a schedule in Dagster, and what is not ends in a sentence."""

from pathlib import Path

import dagster as dg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pf_assets.settings import DEMO_SITE
from pf_core.config.cron import cron_text
from pf_core.config.site import load_site
from pf_core.errors import PipelineError

GOOD = [
    *("0 2 * * *", "*/15 * * * *", "0 6 * * 1", "0 6 * * MON-FRI", "30 4 1,15 * *", "0 0 29 2 *", "59 23 31 12 7"),
    *("5/10 0-6/2 * jan,Mar sun", " 0  2 *\t* * ", "00 02 * * *"),
]

BAD = [
    *("", "daily", "0 2 * *", "0 2 * * * *", "60 2 * * *", "0 24 * * *", "0 2 0 * *", "0 2 32 * *", "0 2 * 13 *"),
    *(
        "0 2 * * 8",
        "0 2 * * MOON",
        "*/0 2 * * *",
        "*/60 2 * * *",
        "5-9/5 2 * * *",
        "0 5-3 * * *",
        "0 2 30 2 *",
        "0 0 31 4,6 *",
        "0 2 * * *; rm -rf /",
    ),
    *("-1 2 * * *", "1.5 2 * * *", "*-5 2 * * *", ", 2 * * *", "٣ 2 * * *", "@reboot"),
]


def schedule_of(cron: str) -> dg.ScheduleDefinition:
    job = dg.define_asset_job("job", dg.AssetSelection.all())
    return dg.ScheduleDefinition(job=job, cron_schedule=cron)


@pytest.mark.parametrize("text", GOOD)
def test_what_is_accepted_is_a_schedule(text: str) -> None:
    assert schedule_of(cron_text(text)).cron_schedule == " ".join(text.split())


@pytest.mark.parametrize("text", BAD)
def test_what_is_refused_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"cron|is no|names a day"):
        cron_text(text)


FIELD = st.one_of(
    st.just("*"),
    st.text("0123456789*/,-ABEFJLMNOSTU#?@ ", min_size=1, max_size=6),
    st.lists(st.integers(0, 60).map(str), min_size=1, max_size=3).map(",".join),
    st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(0, 9)).map(lambda n: f"{n[0]}-{n[1]}/{n[2]}"),
)


def accepted(text: str) -> str | None:
    try:
        return cron_text(text)
    except ValueError:
        return None


@given(fields=st.lists(st.one_of(st.just("*"), FIELD), min_size=5, max_size=5))
def test_no_expression_is_accepted_that_dagster_refuses(fields: list[str]) -> None:
    for number, field in enumerate(fields):  # each alone, and the day and the month together
        for chosen in ({number: field}, {2: fields[2], 3: fields[3]}):
            cron = accepted(" ".join(chosen.get(place, "*") for place in range(5)))
            assert cron is None or schedule_of(cron).cron_schedule == cron


@pytest.mark.parametrize("key", ["daily_cron", "training_cron"])
def test_a_bad_cron_in_the_site_file_is_a_sentence(tmp_path: Path, key: str) -> None:
    content = yaml.safe_load(DEMO_SITE.read_text())
    content["serving"] = content.get("serving", {}) | {key: "every morning"}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        PipelineError, match=rf"serving\.{key}: 'every morning' is not a cron expression of five fields"
    ):
        load_site(tmp_path / "site.yaml", environment={"PF_DATA_DIR": str(tmp_path)})
