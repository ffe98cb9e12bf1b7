"""Logs as typed tables: for pandas, and as Parquet files for DuckDB, Polars and a data lake.

`schema` has the columns, `rows` fills them from a log, `arrow` makes Arrow tables and Parquet files. Only `arrow` needs
pyarrow.
"""
