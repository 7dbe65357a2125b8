"""Data for the ranks: writing DataFrames as Parquet files, and reading a rank's share as batches."""
