"""Data for the ranks: a DataFrame as Parquet files, and each rank's share of them as batches of numpy arrays."""
