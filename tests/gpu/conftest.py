"""Skip each test here on a machine without a GPU; the reason names the missing part."""

from __future__ import annotations

import functools

import pytest

from pyhvd.run.cuda_facts import probe_cuda


@functools.cache
def why_no_gpu() -> str:
    """Return why no GPU can be used; empty if one can."""
    facts = probe_cuda()
    if not facts.cupy:
        return facts.errors.get("CuPy", "CuPy is not installed")
    return "" if facts.devices else f"CUDA sees no device: {facts.errors.get('devices', 'it counts none')}"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if reason := why_no_gpu():
        pytest.skip(reason)
