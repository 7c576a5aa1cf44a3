"""Arrays on disk: an .npy file that grows by appending, an Arrow file that is memory-mapped."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class NpyFile:
    """An .npy file that grows by appending; its header is rewritten at the end, when the length is known."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, *, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype, self._row_shape = np.dtype(dtype), row_shape
        self._length = 0
        self._file = path.open("wb")
        self._write_header()

    def __len__(self) -> int:
        return self._length

    def append(self, values: np.ndarray) -> None:
        """Append rows, cast to the type of the file."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        """Write the final header and close the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Write the header; numpy pads it, so that its size does not depend on the number of rows."""
        shape = (self._length, *self._row_shape)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        )


def read_arrow(path: Path) -> pa.Table:
    """Read an Arrow IPC file, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
