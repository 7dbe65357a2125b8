"""Data for the ranks: a DataFrame as Parquet files, and a rank's share of them as batches of arrays."""
