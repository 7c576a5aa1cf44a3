"""The site file: it is read as intended, or refused with the place of the mistake."""

import traceback
from pathlib import Path

import pytest

from pf_core.config.files import Files
from pf_core.config.site import Site, load_site
from pf_core.config.source import ColumnVectors, NpyVectors
from pf_core.days import ds_range, ds_start_us, parse_ds, shift_ds
from pf_core.errors import PipelineError

REPOSITORY = Path(__file__).parents[2]

GOOD = """\
name: shop
start_ds: 2026-01-01
end_ds: 2026-03-31
data_dir: ${SHOP_DATA:-out}
source:
  root: ${SHOP_LOGS}
  actions:
    path: actions/{ds}/*.csv.gz
    user_id: user
    pin_id: {column: pin, type: string}
    ts: {column: at, unit: ms}
    action_type:
      column: event
      values: {1: repin, 2: closeup}
    surface:
      rules:
        - {is: homefeed, when: {place: home, depth: {at_most: 3}}}
        - {skip: true}
    duration_s: {column: dwell, unit: ms}
    late_days: 2
  pins:
    pin_id: {column: pin, type: string}
    catalogue: {path: "pins/{ds}.parquet"}
    vectors: vector
    interest: topic
"""
ENVIRONMENT = {"SHOP_LOGS": "/logs/shop"}
REDIS = {"REDIS_URL": "redis://:s3cret@host:1"}


def changed(*replacements: tuple[str, str]) -> str:
    text = GOOD
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def load(folder: Path, text: str, environment: dict[str, str] = ENVIRONMENT) -> Site:
    path = folder / "site.yaml"
    path.write_text(text)
    return load_site(path, environment=environment)


def refusal(folder: Path, text: str, environment: dict[str, str] = ENVIRONMENT) -> str:
    """Return the error message, which always names the file."""
    with pytest.raises(PipelineError) as error:
        load(folder, text, environment)
    assert str(folder / "site.yaml") in str(error.value)
    return str(error.value)


def with_pins(vectors: str, catalogue: str | None = None) -> str:
    head, _ = GOOD.split("    catalogue:")
    described = f"    catalogue: {catalogue}\n" if catalogue is not None else ""
    return f"{head}{described}    vectors: {vectors}\n"


def test_a_good_file_is_read_as_it_is_meant(tmp_path: Path) -> None:
    site = load(tmp_path, GOOD)
    actions, pins = site.source.actions, site.source.pins
    assert (site.name, site.start_ds, site.end_ds) == ("shop", "2026-01-01", "2026-03-31")
    assert (actions.user_id.column, actions.user_id.type) == ("user", "int")
    assert (actions.pin_id.column, actions.pin_id.type) == ("pin", "string")
    assert actions.action_type.values == {"1": "repin", "2": "closeup"}
    assert [rule.value for rule in actions.surface.rules] == ["homefeed", None]
    assert actions.surface.rules[0].when["place"].equals == "home"
    assert actions.surface.rules[0].when["depth"].at_most == 3.0
    assert actions.mapped_columns == ["at", "depth", "dwell", "event", "pin", "place", "user"]
    assert actions.file_format == "csv"
    assert actions.is_dated
    assert pins.vectors == ColumnVectors(column="vector")
    assert pins.is_incremental


def test_the_paper_s_positive_engagement_is_the_default(tmp_path: Path) -> None:
    positive = load(tmp_path, GOOD).source.positive
    assert positive.action_types == ("repin", "closeup", "click")
    assert positive.longer_than_s == {"closeup": 10.0, "click": 10.0}
    assert positive.surfaces == ("homefeed",)


RATINGS = """\
name: ratings
start_ds: 2026-01-01
source:
  actions:
    path: ratings.csv
    user_id: user
    pin_id: {column: movie, type: string}
    ts: {column: at, unit: s}
    action_type: {constant: rate}
"""


def test_a_log_without_surfaces_durations_and_catalogue_needs_no_words_about_them(tmp_path: Path) -> None:
    source = load(tmp_path, RATINGS).source
    assert source.actions.surface.constant == "unknown"
    assert source.pins.pin_id.type == "string"
    assert source.positive.action_types == ("rate",)
    assert source.positive.longer_than_s == {}
    assert source.positive.surfaces is None
    again = Site.model_validate_json(load(tmp_path, RATINGS).model_dump_json(by_alias=True))
    assert again.source == source


def test_what_is_given_is_not_completed(tmp_path: Path) -> None:
    given = RATINGS + "  positive: {longer_than_s: {rate: 3}, surfaces: [unknown]}\n"
    positive = load(tmp_path, given).source.positive
    assert positive.action_types == ("rate",)
    assert positive.longer_than_s == {"rate": 3}
    assert positive.surfaces == ("unknown",)


def test_a_catalogue_needs_the_column_of_its_pin_ids(tmp_path: Path) -> None:
    text = RATINGS + "  pins: {catalogue: {path: movies.csv}}\n"
    assert "source.pins: `pin_id` is missing" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("positive", "complaint"),
    [
        ("{action_types: [repin, clik]}", "`positive.action_types` names clik, but `actions.action_type` only gives"),
        ("{longer_than_s: {closup: 5}}", "`positive.longer_than_s` names closup, but `actions.action_type` only gives"),
        ("{surfaces: [search]}", "`positive.surfaces` names search, but `actions.surface` only gives homefeed"),
    ],
)
def test_a_positive_name_that_the_log_never_gives_is_refused(tmp_path: Path, positive: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, GOOD + f"  positive: {positive}\n")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "{1: repin, 2: closeup}",
            "{1: like, 2: share}",
            "`positive.action_types` is by default repin, closeup, click",
        ),
        (
            "is: homefeed",
            "is: front",
            "`positive.surfaces` is by default homefeed, but `actions.surface` only gives front",
        ),
    ],
)
def test_defaults_under_which_no_action_is_positive_are_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert complaint in refusal(tmp_path, changed((old, new)))


def test_positive_names_of_a_log_that_names_its_own_types_are_not_checked(tmp_path: Path) -> None:
    text = changed(("\n      column: event\n      values: {1: repin, 2: closeup}", " event"))
    text += "  positive: {action_types: [buy]}\n"
    assert load(tmp_path, text).source.positive.action_types == ("buy",)


def test_the_demo_file_is_valid() -> None:
    site = load_site(REPOSITORY / "pf_assets" / "demo.yaml", environment={"PF_DATA_DIR": "/data"})
    assert site.directory == Path("/data/demo")
    assert site.log_root == Path("/data/demo_site")
    assert site.deletion_list == "/data/demo_site/forget.txt"


# Paths and the environment


def test_relative_paths_are_relative_to_the_file_not_to_the_working_directory(tmp_path: Path) -> None:
    site = load(tmp_path, changed(("${SHOP_LOGS}", "logs"), ("${SHOP_DATA:-out}", "out\ndeletion_list: forget.txt")))
    assert site.log_root == tmp_path / "logs"
    assert site.directory == tmp_path / "out" / "shop"
    assert site.deletion_list == str(tmp_path / "forget.txt")


def test_absolute_paths_stay(tmp_path: Path) -> None:
    site = load(tmp_path, GOOD, {"SHOP_LOGS": "/logs/shop", "SHOP_DATA": "/data"})
    assert site.log_root == Path("/logs/shop")
    assert site.directory == Path("/data/shop")


def test_a_variable_that_is_not_set_takes_its_default(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, ENVIRONMENT).directory == tmp_path / "out" / "shop"


def test_a_variable_without_value_and_default_is_refused(tmp_path: Path) -> None:
    assert "SHOP_LOGS" in refusal(tmp_path, GOOD, {"SHOP_DATA": "/data"})


@pytest.mark.parametrize(
    "value",
    ["it's", 'a "b" c', "a: b", "a # b", "{a: 1}", "[a]", "x\ny: z", "\n", "- a", "*a", "&a b", "%", "@", "${X}"],
)
@pytest.mark.parametrize("scalar", ["${TOPIC}", "'${TOPIC}'", '"${TOPIC}"', "|-\n      ${TOPIC}"])
def test_a_variable_is_a_value_whatever_its_characters(tmp_path: Path, value: str, scalar: str) -> None:
    text = changed(("interest: topic", f"interest: {scalar}"))
    assert load(tmp_path, text, ENVIRONMENT | {"TOPIC": value}).source.pins.interest == value


def test_a_variable_inside_a_flow_mapping_and_inside_a_text(tmp_path: Path) -> None:
    text = changed(("column: dwell", "column: ${DWELL}"), ("*.csv.gz", "${A:-part}-${B}.csv.gz"))
    actions = load(tmp_path, text, ENVIRONMENT | {"DWELL": "a, b: 'c'}", "B": "7: 8"}).source.actions
    assert actions.duration_s is not None
    assert actions.duration_s.column == "a, b: 'c'}"
    assert actions.path == "actions/{ds}/part-7: 8.csv.gz"


def test_a_variable_alone_has_the_type_of_its_value(tmp_path: Path) -> None:
    text = changed(
        ("late_days: 2", "late_days: ${LATE}"),
        ("start_ds: 2026-01-01", "start_ds: ${START:-2026-01-01}"),
        ("end_ds: 2026-03-31", "end_ds: ${END:-null}"),
        ("depth: {at_most: 3}", "depth: ${DEPTH}, kind: '${DEPTH}', seen: ${SEEN}"),
    )
    site = load(tmp_path, text, ENVIRONMENT | {"LATE": "3", "DEPTH": "5", "SEEN": "true"})
    assert site.source.actions.late_days == 3
    assert (site.start_ds, site.end_ds) == ("2026-01-01", None)
    when = site.source.actions.surface.rules[0].when
    assert [when[name].equals for name in ("depth", "kind", "seen")] == [5, "5", True]


@pytest.mark.parametrize("value", ["<<", "=", "0b_", "2026-02-30"])
def test_a_value_that_only_looks_like_yaml_is_text(tmp_path: Path, value: str) -> None:
    text = changed(("depth: {at_most: 3}", "depth: ${DEPTH}"))
    site = load(tmp_path, text, ENVIRONMENT | {"DEPTH": value})
    assert site.source.actions.surface.rules[0].when["depth"].equals == value


def test_a_variable_in_a_comment_need_not_be_set(tmp_path: Path) -> None:
    assert load(tmp_path, "# ${NOT_SET}\n" + GOOD).name == "shop"


def test_the_place_of_a_yaml_error_is_that_in_the_file(tmp_path: Path) -> None:
    text = "name: shop\nsource: {root: ${SHOP_LOGS}, actions: ]\n"
    assert f"in line 2, column {text.splitlines()[1].index(']') + 1}" in refusal(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no site file at .*absent\.yaml; set PF_SITE"):
        load_site(tmp_path / "absent.yaml", environment={})


# Mistakes


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("late_days: 2", "late_dayz: 2", "source.actions.late_dayz: is not a known key"),
        ("end_ds:", "ends:", "ends: is not a known key"),
        ("dwell, unit: ms}", "dwell, units: ms}", "source.actions.duration_s.units: is not a known key"),
        ("name: shop", "name: my/shop", "name"),
        ("name: shop\n", "", "name: Field required"),
        ("at, unit: ms}", "at, unit: hours}", "source.actions.ts.unit"),
        ("at, unit: ms}", "at}", "source.actions: `ts.unit` is missing: give s, ms, us or iso"),
        ("at, unit: ms}", 'at, unit: ms, format: "%Y-%m-%d"}', "source.actions.ts: give `unit` or `format`, not both"),
        ("at, unit: ms}", 'at, format: "%m/%d %H:%M"}', "does not name year (%Y), month (%m or %b) and day (%d)"),
        ("type: string}\n    ts", "type: uuid}\n    ts", "source.actions.pin_id.type"),
        ("user_id: user", "user_id: pin", "source.actions: column 'pin' is mapped to two of"),
        ("user_id: user", "user_id: at", "source.actions: column 'at' is mapped to two of"),
        ("column: dwell", "column: user", "source.actions: column 'user' is mapped to two of"),
        ("{skip: true}", "{when: {place: shop}}", "source.actions.surface.rules.1: a rule needs exactly one of"),
        ("{skip: true}", "{skip: true, is: x}", "source.actions.surface.rules.1: a rule needs exactly one of"),
        ("{at_most: 3}", "{}", "source.actions.surface.rules.0.when.depth: an empty condition"),
        ("{at_most: 3}", "{atmost: 3}", "source.actions.surface.rules.0.when.depth.atmost: is not a known key"),
        ("{at_most: 3}", ".inf", "source.actions.surface.rules.0.when.depth: inf is no number that a log can have"),
        ("{at_most: 3}", "{equals: -.inf}", "rules.0.when.depth: -inf is no number"),
        ("{at_most: 3}", "[1, .nan]", "rules.0.when.depth: nan is no number"),
        ("{at_most: 3}", f"1{'0' * 400}", "rules.0.when.depth: 1000"),
        ("{at_most: 3}", "{missing: }", "source.actions.surface.rules.0.when.depth: an empty condition"),
        ("{at_most: 3}", "{missing: true, above: 1}", "rules.0.when.depth: `missing: true` holds for no value"),
        ("column: event\n", "constant: click\n", "source.actions.action_type: `values` maps the values of a column"),
        ("      column: event\n", "", "source.actions.action_type: give exactly one of"),
        ("column: event\n", "column: event\n      constant: x\n", "source.actions.action_type: give exactly one of"),
        ("*.csv.gz", "*.xml", "source.actions: unknown file format of 'actions/{ds}/*.xml'"),
        ("*.csv.gz", "part-*", "source.actions: unknown file format of"),
        ("late_days: 2", "late_days: -1", "source.actions.late_days"),
        ("late_days: 2", "late_days: 2\n    delimiter: ''", "source.actions.delimiter"),
        (
            "late_days: 2",
            'late_days: 2\n    delimiter: "a\\n"',
            "source.actions: `delimiter` contains the end of a line",
        ),
        ("late_days: 2", "late_days: 2\n    delimiter: '\"\"'", "source.actions: `delimiter` contains the quote"),
        ("late_days: 2", 'late_days: 2\n    delimiter: "\\0"', "source.actions: `delimiter` contains NUL"),
        ("late_days: 2", 'late_days: 2\n    delimiter: "\\x1f\\x1f"', "several characters with 0x1F"),
        ("late_days: 2", "late_days: 2\n    quote: «", "source.actions: `quote` is '«': only ASCII"),
        ("late_days: 2", 'late_days: 2\n    quote: "\\n"', "source.actions: `quote` is '\\n': only ASCII"),
        ("late_days: 2", "late_days: 2\n    columns: []", "source.actions.columns"),
        ("late_days: 2", "late_days: 2\n    columns: [at, at]", "source.actions: `columns` names 'at' twice"),
        ("late_days: 2", "late_days: 2\n    columns: [user, pin, at, event, dwell]", "does not name 'depth', 'place'"),
        ('{ds}.parquet"', '{ds}.parquet", columns: [pin]', "source.pins.catalogue: `columns` names the columns of CSV"),
        ("end_ds: 2026-03-31", "end_ds: 2025-12-31", "end_ds 2025-12-31 is before start_ds 2026-01-01"),
        ("start_ds: 2026-01-01", "start_ds: soon", "start_ds: 'soon' is not a day; write it as YYYY-MM-DD"),
        ("start_ds: 2026-01-01", "start_ds: '2026-02-30'", "start_ds: '2026-02-30' is not a day"),
        ("start_ds: 2026-01-01", "start_ds: 2026-02-30", "start_ds: '2026-02-30' is not a day"),
        ("end_ds: 2026-03-31", "end_ds: 31.3.2026", "end_ds: '31.3.2026' is not a day"),
        ("    vectors: vector\n", "    vectors: 5\n", "source.pins.vectors"),
    ],
)
def test_a_mistake_is_refused_with_its_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert field in refusal(tmp_path, changed((old, new)))


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, changed(("late_days: 2", "late_dayz: 2"), ("at, unit: ms}", "at, unit: h}")))
    assert "source.actions.late_dayz" in message
    assert "source.actions.ts.unit" in message


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("late_days: 2", "late_days: 2\n    late_days: 3", "late_days"),
        ("{1: repin, 2: closeup}", "{1: repin, 1: closeup}", "1"),
        ("name: shop", "name: shop\nname: other", "name"),
    ],
)
def test_a_repeated_key_is_refused(tmp_path: Path, old: str, new: str, key: str) -> None:
    message = refusal(tmp_path, changed((old, new)))
    assert "twice" in message
    assert key in message


@pytest.mark.parametrize("text", ["", "- a list\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "must hold a mapping" in refusal(tmp_path, text)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, "name: shop\nsource: " + 3000 * "{a: " + "1" + 3000 * "}")


@pytest.mark.parametrize("text", ["name: [shop\n", "name:\n\tshop\n"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("kind: redis, uri: $URL", "serving.store.uri: is not a known key"),
        ("kind: lmdb, url: $URL, cluster: true", "cluster is a setting of kind: redis"),
    ],
)
def test_a_refusal_does_not_quote_secrets(tmp_path: Path, store: str, reason: str) -> None:
    text = GOOD + f"serving: {{store: {{{store.replace('$URL', '${REDIS_URL}')}}}}}\n"
    with pytest.raises(PipelineError, match=reason) as caught:
        load(tmp_path, text, ENVIRONMENT | REDIS)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_the_address_of_the_store_is_not_in_the_site_s_repr(tmp_path: Path) -> None:
    text = GOOD + "serving: {store: {kind: redis, cluster: true, url: '${REDIS_URL}'}}\n"
    site = load(tmp_path, text, ENVIRONMENT | REDIS)
    assert site.serving.store.cluster
    assert "s3cret" not in repr(site)


def test_a_file_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")
    with pytest.raises(PipelineError, match=r"site\.yaml"):
        load_site(path, environment=ENVIRONMENT)


def test_pin_ids_have_one_type(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, changed(("pin_id: {column: pin, type: string}\n    catalogue", "pin_id: pin\n    catalogue"))
    )
    assert "pin ids are string in `actions` and int in `pins`" in message


def test_days_are_refused_in_iso_8601_s_other_spellings(tmp_path: Path) -> None:
    """Days are compared as text all over the pipeline, so only one spelling may come in."""
    without_end = changed(("end_ds: 2026-03-31\n", ""), ("start_ds: 2026-01-01", "start_ds: 20260101"))
    assert "start_ds: '20260101' is not a day" in refusal(tmp_path, without_end)


def test_an_unknown_timezone_is_refused_when_the_file_is_read(tmp_path: Path) -> None:
    text = changed(("at, unit: ms}", "at, unit: iso, timezone: Mars/Base}"))
    assert "source.actions.ts.timezone" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("depth: {at_most: 3}", "depth: ", "source.actions.surface.rules.0.when.depth"),
        ("{at_most: 3}", "{at_most: }", "source.actions.surface.rules.0.when.depth"),
        ("{at_most: 3}", "{any_of: []}", "source.actions.surface.rules.0.when.depth"),
        ("{at_most: 3}", "{at_most: .nan}", "source.actions.surface.rules.0.when.depth"),
        ("{1: repin, 2: closeup}", "{}", "source.actions.action_type"),
    ],
)
def test_a_condition_or_map_without_content_is_refused(tmp_path: Path, old: str, new: str, field: str) -> None:
    """`when: {depth: }` would hold for every row, and the others are not valid SQL."""
    assert field in refusal(tmp_path, changed((old, new)))


# Vectors


def test_vectors_from_a_matrix(tmp_path: Path) -> None:
    pins = load(tmp_path, with_pins("{npy: vectors.npy, ids: ids.npy}")).source.pins
    assert pins.vectors == NpyVectors(npy="vectors.npy", ids="ids.npy")
    assert not pins.is_incremental


def test_vectors_from_a_matrix_with_a_csv_catalogue(tmp_path: Path) -> None:
    pins = load(tmp_path, with_pins("{npy: vectors.npy, ids: ids.npy}", "{path: pins.csv}")).source.pins
    assert pins.catalogue == Files(path="pins.csv")
    assert not pins.is_incremental


@pytest.mark.parametrize("vectors", ["{until: 2026-02-01, dim: 32}", "{until: '2026-02-01'}", "{dim: 8}", "learned"])
def test_vectors_are_no_longer_learned(tmp_path: Path, vectors: str) -> None:
    """A site file of an earlier version is refused with what to delete."""
    what = "source.pins.vectors: vectors are no longer learned by pin_features"
    assert f"{what}; delete `vectors`: the model learns factors itself" in refusal(tmp_path, with_pins(vectors))


def test_vectors_and_catalogue_are_optional(tmp_path: Path) -> None:
    source = load(tmp_path, GOOD.partition("  pins:")[0]).source
    assert source.pins.vectors is None
    assert source.pins.catalogue is None
    assert source.pins.pin_id == source.actions.pin_id
    assert not source.pins.is_incremental


@pytest.mark.parametrize("path", ["pins.csv", "pins/{ds}.csv"])
def test_a_catalogue_without_vectors(tmp_path: Path, path: str) -> None:
    pins = load(tmp_path, with_pins("null", f'{{path: "{path}"}}')).source.pins
    assert pins.vectors is None
    assert pins.is_incremental == ("{ds}" in path)
    assert "vector" not in pins.mapped_columns


def test_the_long_form_of_a_vector_column(tmp_path: Path) -> None:
    pins = load(tmp_path, with_pins("{column: vector}", "{path: pins.jsonl}")).source.pins
    assert pins.vectors == ColumnVectors(column="vector")
    assert not pins.is_incremental


@pytest.mark.parametrize(
    ("vectors", "catalogue", "complaint"),
    [
        ("vector", None, "source.pins: `interest`, `is_candidate` and a vector column are read from `catalogue`"),
        ("vector", "{path: pins.csv.gz}", "source.pins: vectors in a column need a Parquet or JSON-lines catalogue"),
        ("{npy: v.npy, ids: i.npy}", '{path: "pins/{ds}.csv"}', "source.pins: a catalogue with {ds} in its path"),
        ("{npy: v.npy}", None, "source.pins.vectors.npy.ids: Field required"),
        ("{npy: v.npy, ids: i.npy, dim: 8}", None, "source.pins.vectors.npy.dim: is not a known key"),
        ("{colum: vector}", None, "colum: is not a known key"),
    ],
)
def test_vectors_that_cannot_be_had_are_refused(
    tmp_path: Path, vectors: str, catalogue: str | None, complaint: str
) -> None:
    assert complaint in refusal(tmp_path, with_pins(vectors, catalogue))


# Formats


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.csv", "csv"),
        ("a.csv.gz", "csv"),
        ("a.csv.zst", "csv"),
        ("a.tsv", "csv"),
        ("{ds}/*.jsonl", "jsonl"),
        ("{ds}/*.ndjson.gz", "jsonl"),
        ("v1.2/part-*.snappy.parquet", "parquet"),
        ("**/*.pq", "parquet"),
    ],
)
def test_the_suffix_determines_the_format(path: str, expected: str) -> None:
    assert Files(path=path).file_format == expected


def test_a_delimiter_of_several_characters_and_columns_without_a_header(tmp_path: Path) -> None:
    described = "late_days: 2\n    delimiter: '::'\n    columns: [user, pin, at, event, place, depth, dwell, other]"
    actions = load(tmp_path, changed(("late_days: 2", described))).source.actions
    assert actions.delimiter == "::"
    assert actions.columns == ("user", "pin", "at", "event", "place", "depth", "dwell", "other")
    assert (Files(path="a.tsv").delimiter, Files(path="a.csv").columns) == ("\t", None)


def test_a_catalogue_without_a_header_names_the_columns_that_are_read(tmp_path: Path) -> None:
    text = with_pins("{npy: v.npy, ids: i.npy}", "{path: pins.csv, columns: [title]}")
    assert "source.pins: `columns` does not name 'pin', which the mapping reads" in refusal(tmp_path, text)


def test_a_stated_format_wins_over_the_suffix() -> None:
    assert Files(path="part-*.txt", format="csv").file_format == "csv"
    assert Files(path="part-*.csv", format="jsonl").file_format == "jsonl"


# Fingerprint and days


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start_ds: 2026-01-01", "start_ds: 2026-01-02"),
        ("late_days: 2", "late_days: 1"),
        ("{1: repin, 2: closeup}", "{1: repin, 2: click}"),
        ("{at_most: 3}", "{at_most: 4}"),
        ("name: shop", "name: shop\ntimelines: {num_buckets: 16}"),
        ("    interest: topic\n", "    interest: topic\n  positive: {longer_than_s: {closeup: 5}}\n"),
    ],
)
def test_the_fingerprint_changes_with_what_matters(tmp_path: Path, old: str, new: str) -> None:
    assert load(tmp_path, changed((old, new))).fingerprint() != load(tmp_path, GOOD).fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: shop", "# a comment\nname: shop"),
        ("name: shop", "name: shop\nengine: {num_workers: 7, memory_mb: 64}"),
        ("user_id: user", "user_id: {column: user, type: int}"),
    ],
)
def test_the_fingerprint_ignores_spelling_and_machine(tmp_path: Path, old: str, new: str) -> None:
    assert load(tmp_path, changed((old, new))).fingerprint() == load(tmp_path, GOOD).fingerprint()


def test_days() -> None:
    assert shift_ds("2024-02-28", 2) == "2024-03-01"  # a leap year
    assert shift_ds("2026-01-01", -1) == "2025-12-31"
    assert ds_range("2025-12-30", "2026-01-01") == ["2025-12-30", "2025-12-31", "2026-01-01"]
    assert ds_range("2026-01-01", "2025-12-31") == []
    assert ds_start_us("2026-01-01") == (56 * 365 + 14) * 86_400 * 1_000_000  # 56 years, 14 of them leap years
    with pytest.raises(PipelineError, match="'2026-13-01' is not a day"):
        parse_ds("2026-13-01")


def test_a_variable_in_a_key_is_refused_without_its_value(tmp_path: Path) -> None:
    text = GOOD + "serving:\n  store: {kind: redis, url:${REDIS_URL}}\n"
    message = refusal(tmp_path, text, ENVIRONMENT | REDIS)
    assert "a key has a variable (is a space missing after a colon?) in line 27, column 24" in message
    assert "s3cret" not in message


@pytest.mark.parametrize("key", ["data_dir", "deletion_list", "root"])
def test_an_unknown_object_store_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    old = {"data_dir": "data_dir: ${SHOP_DATA:-out}", "deletion_list": "name: shop", "root": "root: ${SHOP_LOGS}"}[key]
    new = "name: shop\ndeletion_list: ftp://x" if key == "deletion_list" else f"{key}: ftp://x"
    assert f"{key}: ftp://x: unknown object store" in refusal(tmp_path, changed((old, new)))
