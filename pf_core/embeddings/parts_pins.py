"""Pins embedded by a model of parts as of a day: the pin side reads the counts of the days up to that day.

A pin that came after training has no factor; content and trend carry it. A pin that is longer than the model's constant
is clipped and counted.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from pf_core.days import DAY_US, ds_start_us
from pf_core.hashing import combined
from pf_core.model.device import single_threaded
from pf_core.model.parts.inputs import PinInputs, unit_rows
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.statistics import DayCounts, raw_statistics
from pf_core.model.parts.table import PinTable
from pf_core.pins.counts import PinCounts
from pf_core.pins.inputs import digest_of_ids
from pf_core.pins.lookup import find_pins

BLOCK_ROWS = 1024


@dataclass(kw_only=True, eq=False)
class PartsPins:
    """Embeds the pins of a day."""

    model: PartsModel
    table: PinTable
    counts: PinCounts
    """Counts as of the day."""
    day: int
    """The day after, in days since 1970: counts are of the days before it."""
    first_day: int
    """First day of the training set."""
    num_pins: int
    """Number of pins of the day, with counts or without."""
    num_clipped: int = 0
    _mean_F: np.ndarray = field(init=False)
    _mean_rate_W: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        raw_NF, counted = self._statistics(self.counts.ids)
        self._mean_F = raw_NF.mean(axis=0) if len(raw_NF) else np.zeros(raw_NF.shape[1])
        total_W = counted.rates().sum(axis=0, dtype=np.float64)
        self._mean_rate_W = (total_W / max(1, self.num_pins)).astype(np.float32)

    def _statistics(self, pin_ids: pa.Array) -> tuple[np.ndarray, DayCounts]:
        counts, row = self.counts.of(pin_ids), find_pins(self.table.ids, pin_ids)
        age_N = np.where(counts.first_day_N >= 0, self.day - counts.first_day_N, 0)
        num_days = min(self.day - self.first_day, counts.max_days)
        counted = DayCounts(counts.user_days_NW, age_N, max(1, num_days))
        repeat_N = np.where(row >= 0, self.table.log_repeat[np.maximum(row, 0)], np.float32(0))
        return raw_statistics(counted, repeat_N), counted

    def inputs(self, pin_ids: pa.Array, content_NC: np.ndarray) -> tuple[PinInputs, np.ndarray]:
        """Return the inputs of these pins, and their rates."""
        raw_NF, counted = self._statistics(pin_ids)
        statistics_NF = (raw_NF - self._mean_F).astype(np.float32)
        row = find_pins(self.table.ids, pin_ids)
        is_known, row = row >= 0, np.maximum(row, 0)
        inputs = PinInputs(
            factor_MD=torch.from_numpy(np.where(is_known[:, None], self.table.factor[row], np.float32(0))),
            trust_M=torch.from_numpy(np.where(is_known, self.table.trust[row], np.float32(0))),
            statistics_MF=torch.from_numpy(statistics_NF),
            content_MC=torch.from_numpy(content_NC),
        )
        return inputs, counted.rates()

    @torch.inference_mode()
    def embed_block(self, inputs: PinInputs, rates_MW: torch.Tensor) -> tuple[np.ndarray, int]:
        """Return float16 unit vectors of at most BLOCK_ROWS pins, and how many were clipped; one shape for all."""
        num, device = len(inputs.trust_M), self.model.pin_length.device
        filled = PinInputs(*(_filled(values) for values in inputs)).to(device)
        mean_rate_W = torch.from_numpy(self._mean_rate_W).to(device)
        vector_MV = self.model.embed_pins(filled, _filled(rates_MW).to(device), mean_rate_W)
        unit_MV, is_clipped_M = self.model.unit_pins(vector_MV)
        return unit_MV[:num].half().cpu().numpy(), int(is_clipped_M[:num].sum())

    @contextlib.contextmanager
    def embedding(self, *, num_threads: int) -> Iterator[Callable[[pa.Table], np.ndarray]]:
        """Yield a function from rows of pin_features to float16 unit vectors."""

        def embed(chunk: pa.Table) -> np.ndarray:
            pin_ids = combined(chunk["pin_id"])
            inputs, rates_NW = self.inputs(pin_ids, unit_content(chunk, self.model.content_dim))
            starts = range(0, len(pin_ids), BLOCK_ROWS)
            blocks = [
                (
                    PinInputs(*(values[start : start + BLOCK_ROWS] for values in inputs)),
                    torch.from_numpy(rates_NW[start : start + BLOCK_ROWS]),
                )
                for start in starts
            ]
            found = list(pool.map(lambda block: self.embed_block(*block), blocks))
            self.num_clipped += sum(num_clipped for _, num_clipped in found)
            return np.concatenate([vectors for vectors, _ in found])

        with single_threaded(), ThreadPoolExecutor(num_threads) as pool:
            yield embed


def open_parts_pins(
    ds: str, model: PartsModel, table: PinTable, counts: PinCounts, *, first_us: int, num_pins: int
) -> PartsPins:
    """Return what embeds the pins as of the end of `ds`; `first_us` is the first action of the training set."""
    day = ds_start_us(ds) // DAY_US + 1
    return PartsPins(model=model, table=table, counts=counts, day=day, first_day=first_us // DAY_US, num_pins=num_pins)


def counts_digest(counts: PinCounts, ds: str) -> str:
    """Return a digest of the counts as of a day, and of the day: ages and rates count from it."""
    digest = hashlib.sha256(f"{ds} {counts.max_days} {digest_of_ids(counts.ids)}".encode())
    for values in (counts.user_days_NW, counts.first_day_N):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def unit_content(chunk: pa.Table, content_dim: int) -> np.ndarray:
    """Return the unit content vectors of rows of pin_features; zeros for a pin without one."""
    if not content_dim:
        return np.zeros((len(chunk), 0), np.float32)
    column = combined(chunk["feature"])
    is_there = np.asarray(column.is_valid())
    result = np.zeros((len(chunk), content_dim), np.float32)
    result[is_there] = column.filter(pa.array(is_there)).flatten().to_numpy().reshape(-1, content_dim)
    return unit_rows(result)


def _filled(values: torch.Tensor) -> torch.Tensor:
    """Return the rows of a block, filled up with zeros."""
    return torch.cat([values, values.new_zeros(BLOCK_ROWS - len(values), *values.shape[1:])])
