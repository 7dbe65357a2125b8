"""How many steps the test program makes, in which one ranks fail, and how its weights grow."""

from __future__ import annotations

import os

STEPS = 40
STRIKES_IN = 3
"""Ranks fail in this step of a generation, counted from 0."""


def steps() -> int:
    """Return how many steps this rank makes."""
    return int(os.environ.get("STEPS", STEPS))


def strikes_in() -> int:
    """Return in which step of a generation this rank fails."""
    return int(os.environ.get("STRIKES_IN", STRIKES_IN))


def weight(step: int) -> float:
    """Return what each weight is after so many steps."""
    return step * (step + 1) / 2
