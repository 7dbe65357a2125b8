"""The shared-memory path: one Cython extension, and its C under src/."""
