"""Pins that pin_features does not have although the log has them, as if it had been built before their actions."""

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.engine.daily_state import create_bucket
from pf_core.pins.features import pin_state


def make_unknown(site: Site, ds: str, *pins: str) -> None:
    """Remove these pins from a partition of pin_features."""
    state = pin_state(site)
    rows = state.open_bucket(ds, 0).to_table()
    rows = rows.filter(pc.invert(pc.is_in(rows["pin_id"], pa.array(pins))))
    state.publish(ds, [create_bucket(state.bucket_path(0), rows).version], state.require(ds))
