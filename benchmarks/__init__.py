"""Benchmarks: one harness, a file per question. ``python -m benchmarks`` runs them all."""
