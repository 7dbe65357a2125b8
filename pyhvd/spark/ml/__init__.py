"""Spark ML's Estimator and Model: training on the ranks, and predicting in Spark tasks."""
