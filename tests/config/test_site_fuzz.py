"""Mutated site files: each is read as a site on which a run can start, or refused by an error that names the file.

    pytest tests/config/test_site_fuzz.py --fuzz 20000

No message has a secret of the environment. Some of the sites that are read are run: their log is ingested, or refused
in a sentence, and every row is accounted for.
"""

import contextlib
import copy
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from pf_core.config.site import Site, load_site
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.logs.ingest import ingest_days
from tests.support.tried import Tried

REPOSITORY = Path(__file__).parents[2]

NAMES = ("globo", "kuairand", "movietweetings", "completejourney")

EXAMPLES = ["pf_assets/demo.yaml", *(f"docs/sources/{name}.yaml" for name in NAMES)]

SECRET = "s3cret-of-the-environment"

FOLDERS = ("GLOBO_DIR", "KUAIRAND_DIR", "MOVIETWEETINGS_DIR", "COMPLETEJOURNEY_DIR")

ENVIRONMENT = {"SECRET": SECRET} | dict.fromkeys(FOLDERS, "/logs")

OWN = """\
name: small
start_ds: 2026-01-01
end_ds: 2026-01-02
data_dir: data
source:
  root: .
  actions:
    path: logs/{ds}.csv
    user_id: user
    pin_id: {column: pin, type: string}
    ts: {column: at, unit: iso}
    action_type:
      column: event
      values: {save: repin, look: closeup}
    surface:
      rules:
        - {is: homefeed, when: {place: home}}
        - {skip: true}
    duration_s: {column: dwell_s}
    late_days: 1
timelines: {num_buckets: 2}
training:
  users: {column: agreed, values: [yes, 1]}
engine: {num_workers: 1, memory_mb: 64}
serving:
  retention_days: 5
  store: {kind: redis, url: "redis://:${SECRET}@localhost:6379/0"}
"""

LOG = """\
user,pin,at,event,place,dwell_s,agreed
1,a,2026-01-01T10:00:00Z,save,home,1.5,yes
2,b,2026-01-01T11:00:00Z,look,home,,no
3,c,2026-01-01T12:00:00Z,look,away,2,1
x,d,2026-01-01T13:00:00Z,save,home,3,yes
4,e,2026-01-02T01:00:00Z,dance,home,4,
"""

TOKENS = ["null", "true", "~", "[]", "{}", "-1", "0", "1e999", ".nan", "2026-02-30", "'", '"', ": ", "- ", "#", "&a "]
TOKENS += ["*a", "!!python/object:os.system", "!!binary x", "${SECRET}", "${MISSING}", "${SECRET:-x}", "${", "\t", "\n"]
TOKENS += [
    "\x00",
    "|",
    ">",
    "%",
    "@",
    "é",
    "\u2028",
    "\x85",
    "{ds}",
    "*",
    "../..",
    "/",
    "s3://x/y",
    "ftp://x",
    "[" * 50,
]
TOKENS += ["? ", "<<: *a"]

VALUES: list[Any] = [None, True, -1, 0, 1, 2**63, 1.5, float("nan"), "", "x", "user", [], [1], {}, {"column": "user"}]
VALUES += ["s3://b/c", {"constant": "a"}, "logs/*.csv", "logs/{ds}/{ds}.csv", "2026-01-01", ["repin"], "\x1b[31m"]
VALUES += ["a" * 300, {"a": {"b": {}}}]


def mutate_text(rng: random.Random, text: str) -> str:
    for _ in range(rng.randrange(1, 4)):
        place, lines = rng.randrange(len(text) + 1), text.splitlines(keepends=True)
        match rng.randrange(6):
            case 0:
                text = text[:place] + rng.choice(TOKENS) + text[place:]
            case 1:
                text = text[:place] + text[place + rng.randrange(1, 12) :]
            case 2 if lines:
                del lines[rng.randrange(len(lines))]
                text = "".join(lines)
            case 3 if lines:
                text = "".join([*lines, rng.choice(lines)])
            case 4 if lines:
                number = rng.randrange(len(lines))
                lines[number] = rng.choice(["  ", " ", ""]) + lines[number].lstrip()
                text = "".join(lines)
            case _:
                text = text[:place] + text[place : place + rng.randrange(40)] + text[place:]
    return text


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove or rename one or two keys or values, at any depth."""
    for _ in range(rng.randrange(1, 3)):
        places = walk(tree)
        if not places:
            break
        parent, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(["sauce", "Name", "", "user_id", "values", "rules"])] = parent[key]
            case _:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def walk(tree: Any) -> list[tuple[Any, Any]]:
    """Return every mapping and list, with each of its keys or places."""
    found: list[tuple[Any, Any]] = []
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        found += [(tree, key), *walk(value)]
    return found


def load_or_refuse(path: Path) -> Site | None:
    """Read a site file; None if it is refused by an error that names it, without a secret."""
    with contextlib.suppress(PipelineError):
        return load_site(path, environment=ENVIRONMENT)
    with pytest.raises(PipelineError) as refused:
        load_site(path, environment=ENVIRONMENT)
    assert path.name in str(refused.value)
    assert SECRET not in str(refused.value)
    return None


def run(site: Site) -> None:
    """Ingest the first day of the site's log: every row is accounted for, or a sentence says what is wrong."""
    manifests = []
    with LocalEngine(num_workers=1, memory_mb=64, temp_dir=site.workspace / "tmp") as engine:
        forgotten = pa.array([], pa.int64() if site.source.actions.user_id.type == "int" else pa.string())
        with contextlib.suppress(PipelineError):
            manifests += ingest_days(site, [site.start_ds], engine=engine, forgotten=forgotten, progress=lambda _: None)
    for manifest in manifests:
        counts = manifest["counts"]
        spent = ("kept", "duplicates", "skipped", "sent", "forgotten", "quarantined")
        assert counts["read"] + counts["received"] == sum(counts[name] for name in spent)


@pytest.mark.parametrize("how", ["text", "tree"])
def test_a_mutated_site_file_is_read_or_refused(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried, how: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "2026-01-01.csv").write_text(LOG)
    texts = [*[OWN] * 4, *((REPOSITORY / name).read_text() for name in EXAMPLES)]
    num_read = num_run = 0
    for seed in tried.each("mutated site files", pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        text = rng.choice(texts)
        if how == "text":
            text = mutate_text(rng, text)
        else:
            variables = re.compile(r"\$\{\w+(:-[^}]*)?\}")
            plain = variables.sub("x", text) if text is not OWN else text
            text = yaml.safe_dump(mutate_tree(rng, yaml.safe_load(plain)), allow_unicode=True)
        path = tmp_path / "site.yaml"
        path.write_text(text, encoding="utf-8")
        site = load_or_refuse(path)
        if site is not None:
            num_read += 1
            assert load_site(path, environment=ENVIRONMENT).fingerprint() == site.fingerprint()
            if Path(site.data_dir).is_relative_to(tmp_path) and "://" not in site.source.root:
                run(site.model_copy(update={"deletion_list": None}))
                num_run += 1
    assert num_read
    assert num_run
