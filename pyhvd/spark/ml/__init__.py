"""Spark ML's fit and transform: what the driver does, what trains on the ranks, what predicts in tasks."""
