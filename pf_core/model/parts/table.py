"""The pin table of a model: all that its user side knows of pins, frozen with the model and memory-mapped.

pin_id.arrow      ids, ascending; `pins.lookup.find_pins` finds the row of an id
factor.npy        float32 (pins, factor_dim): the factors as of the end of training
trust.npy         float32: trust in the factors
statistics.npy    float32 (pins, statistics): centered, as of the end of training
log_repeat.npy    float32: the statistic that newer counts do not have
vector.npy        float16: the unit vectors of the pins as of the end of training, which choose what memory keeps
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PIN_TABLE = "pin_table"

ARRAYS = ("factor", "trust", "statistics", "log_repeat", "vector")


@dataclass(frozen=True, kw_only=True, eq=False)
class PinTable:
    ids: Path
    """The file pin_id.arrow."""
    factor: np.ndarray
    trust: np.ndarray
    statistics: np.ndarray
    log_repeat: np.ndarray
    vector: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> "PinTable":
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        return cls(ids=folder / "pin_id.arrow", **arrays)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        shutil.copyfile(self.ids, folder / "pin_id.arrow")
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
