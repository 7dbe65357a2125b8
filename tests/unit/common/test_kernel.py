"""The limits of a process's cgroups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyhvd.common.kernel import cgroup_limits

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        ({"a/b/cpu.max": "150000 100000", "a/b/memory.max": "1048576"}, (1.5, MIB)),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, (2.0, None)),
        ({"cpu.max": "50000 100000"}, (0.5, None)),
        ({"a/other/cpu.max": "1000 100000"}, (None, None)),
        (
            {
                "cpu/cpu.cfs_quota_us": "300000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": str(GIB),
            },
            (3.0, GIB),
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            (None, None),
        ),
    ],
)
def test_cgroup_limits(files: dict[str, str], expected: tuple[Any, Any], tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert cgroup_limits(root, own) == expected
