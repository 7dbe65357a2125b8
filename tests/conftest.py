"""Settings of every part of the suite; must not import pyhvd, so that a broken build still reports."""

from __future__ import annotations

from hypothesis import settings

# No deadline: on two shared cores an example's wall time says nothing. Derandomised: a red run is repeatable.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, database=None)
# `pytest --hypothesis-profile=explore` looks for new counter-examples and keeps those it finds.
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("ci")
