"""Chunks of sets that span hosts."""

from __future__ import annotations

import pytest

from pyhvd.native.shared_memory import CHUNK_UNIT
from pyhvd.transport.hosts import CHUNK_MOST, chunk_across

KIB = 1024


@pytest.mark.parametrize(
    ("chunk_size", "hosts", "across"),
    [
        (256, 2, 384),
        (256, 4, 384),
        (256, 8, 768),
        (256, 16, 768),
        (64, 64, 768),
        (512, 64, 768),
        (1024, 2, 1536),  # what the user asks for
        (1024, 64, 1536),
    ],
)
def test_chunks_grow_with_the_hosts_into_which_they_are_cut(chunk_size: int, hosts: int, across: int) -> None:
    assert chunk_across(chunk_size * KIB, hosts) == across * KIB


def test_chunks_are_whole_units_and_never_shrink_with_more_hosts() -> None:
    for chunk_size in (CHUNK_UNIT, 100 * KIB + 64, CHUNK_MOST):
        sizes = [chunk_across(chunk_size, hosts) for hosts in range(2, 65)]
        assert sizes == sorted(sizes)
        assert all(size % CHUNK_UNIT == 0 and size > 0 for size in sizes)
