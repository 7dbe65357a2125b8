"""The driver's process: it starts agents, serves a job, and shows the output of its ranks."""
