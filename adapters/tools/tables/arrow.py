"""The rows of tables as Arrow data: in memory, or as Parquet files that are written while the log is read.

Importing pyarrow takes half a second, so each function imports pyarrow when it is called.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

from kvledger.adapters.tools.tables.schema import SCHEMA_VERSION, ColumnType, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    import pyarrow as pa

ROWS_PER_GROUP: Final = 64 * 1024
"""Rows in a row group of a Parquet file."""
_ROWS_PER_BATCH: Final = 8 * 1024
"""Maximum number of rows to keep as Python objects, which take about ten times the memory of Arrow data."""


def arrow_schema(table: Table) -> pa.Schema:
    """Return the columns of a table with their types."""
    import pyarrow as pa  # noqa: PLC0415

    types = {
        ColumnType.TIMESTAMP: pa.timestamp("us", tz="UTC"),
        ColumnType.INT64: pa.int64(),
        ColumnType.BOOL: pa.bool_(),
        ColumnType.STRING: pa.string(),
        ColumnType.INT64_LIST: pa.list_(pa.field("element", pa.int64())),
    }
    fields = [pa.field(column.name, types[column.type]) for column in table.all_columns]
    metadata = {"kvledger.table": table.name, "kvledger.schema_version": str(SCHEMA_VERSION)}
    return pa.schema(fields, metadata=metadata)


class Batches:
    """Collects rows and passes them on as record batches.

    Args:
        table: the table of the rows.
        take: called with each batch.
    """

    def __init__(self, table: Table, take: Callable[[pa.RecordBatch], object]) -> None:
        self.num_rows = 0
        self.schema = arrow_schema(table)
        self._take = take
        self._rows: list[Sequence[Any]] = []

    def add(self, row: Sequence[Any]) -> None:
        """Add the cells of one row."""
        self.num_rows += 1
        self._rows.append(row)
        if len(self._rows) >= _ROWS_PER_BATCH:
            self.flush()

    def flush(self) -> None:
        """Pass to `take` the rows that were added after the last batch."""
        import pyarrow as pa  # noqa: PLC0415

        if not self._rows:
            return
        arrays = []
        for cells, field in zip(zip(*self._rows, strict=True), self.schema, strict=True):
            values = [cell or None for cell in cells] if field.type == pa.string() else cells
            arrays.append(pa.array(values, field.type))
        self._rows = []
        self._take(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


class ArrowTable:
    """Collects the rows of one table in memory."""

    def __init__(self, table: Table) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = Batches(table, self._batches.append)
        self.add = self._rows.add

    def result(self) -> pa.Table:
        """Return all rows."""
        import pyarrow as pa  # noqa: PLC0415

        self._rows.flush()
        return pa.Table.from_batches(self._batches, self._rows.schema)


def data_frame(table: pa.Table) -> pd.DataFrame:
    """Return the table as a pandas DataFrame with nullable types.

    Raises:
        ModuleNotFoundError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise ModuleNotFoundError(
            "Log.to_pandas needs pandas, which is not installed: pip install pandas", name="pandas"
        )
    import pandas as pd  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    types = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.string(): pd.StringDtype()}
    return table.to_pandas(types_mapper=types.get)


@contextlib.contextmanager
def parquet_file(file: IO[bytes], table: Table) -> Iterator[Batches]:
    """Write rows into a Parquet file (zstd) in row groups of `ROWS_PER_GROUP`.

    The file is complete when the context ends.
    """
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    group: list[pa.RecordBatch] = []

    def write_group() -> None:
        if group:
            writer.write_table(pa.Table.from_batches(group), row_group_size=ROWS_PER_GROUP)
            group.clear()

    def take(batch: pa.RecordBatch) -> None:
        group.append(batch)
        if sum(each.num_rows for each in group) >= ROWS_PER_GROUP:
            write_group()

    rows = Batches(table, take)
    writer = parquet.ParquetWriter(file, rows.schema, compression="zstd")
    try:
        yield rows
        rows.flush()
        write_group()
    except BaseException:
        with contextlib.suppress(OSError):  # the disk is still full
            writer.close()
        raise
    writer.close()
