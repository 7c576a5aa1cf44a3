"""A small shop: a site file, its log, and `pf check` of it."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from typer.testing import CliRunner, Result

from pf_assets.cli.main import app
from pf_core.days import ds_start_us

DAY_S = ds_start_us("2024-03-04") // 1_000_000  # a Monday
ROWS = [f"{user},{pin},{DAY_S + 60 * user},vue" for user in (1, 2, 3) for pin in (7, 8)]


def shop_rows(first_ds: str, *, num_days: int, num_pins: int = 40) -> list[str]:
    """Rows of 40 users, each of whom comes to another pin on every day, at midnight."""
    first_s = ds_start_us(first_ds) // 1_000_000
    return [
        f"{user},{(user + day) % num_pins},{first_s + 86_400 * day},vue"
        for day in range(num_days)
        for user in range(40)
    ]


def write_site(root: Path, **changes: Any) -> Path:
    """A site with the undated log a.csv and pin vectors in a matrix; `changes` replace keys of its `source.actions`.

    The model is the small one of the towers, which has no least number of users.
    """
    actions = {
        "path": "a.csv",
        "user_id": "user",
        "pin_id": "pin",
        "ts": {"column": "at", "unit": "s"},
        "action_type": "event",
    }
    vectors = {"npy": "v.npy", "ids": "i.npy"}
    source = {"actions": actions | changes.pop("actions", {}), "pins": changes.pop("pins", {"vectors": vectors})}
    source["positive"] = changes.pop("positive", {"action_types": ["vue"]})
    content = {"name": "shop", "start_ds": "2024-03-01", "end_ds": "2024-03-31", "data_dir": "data", "source": source}
    content = content | {"training": {"preset": "tiny"}} | changes
    (root / "site.yaml").write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    np.save(root / "v.npy", np.eye(2, dtype=np.float32))
    np.save(root / "i.npy", np.array([7, 8]))
    return root / "site.yaml"


def write_log(
    path: Path, rows: list[str] = ROWS, *, header: str = "user,pin,at,event", encoding: str = "utf-8"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding=encoding)


def check(site: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["check", str(site), *options])


def message_of(result: Result) -> str:
    return f"{result.output}\n{result.exception}"
