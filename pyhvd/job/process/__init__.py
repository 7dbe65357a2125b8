"""One process of a job: its guardian, its signals, its output and its exit report."""
