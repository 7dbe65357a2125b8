"""Tests that need a GPU: without one each is skipped, and the reason says what is missing."""

from __future__ import annotations

import functools

import pytest

from pyhvd.tools.doctor.gpus import probe_cuda


@functools.cache
def obstacle() -> str:
    """Return why there is nothing to test on, or nothing."""
    facts = probe_cuda()
    if not facts.cupy:
        return facts.errors.get("CuPy", "CuPy is not installed")
    return "" if facts.devices else f"CUDA sees no device: {facts.errors.get('devices', 'it counts none')}"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if reason := obstacle():
        pytest.skip(reason)
