"""One process of a job: its guardian, environment, output and exit report."""
