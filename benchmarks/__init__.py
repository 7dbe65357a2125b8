"""The benchmarks: one harness, and one module per question. ``python -m benchmarks`` runs them all."""
