"""The limits of time and memory that the cgroups of this process set (cgroups(7)): those of a container."""

from __future__ import annotations

from pathlib import Path


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None]:
    """Return the quota of time (in cores) and of memory (bytes) of this process's cgroups.

    Version 2: the smallest limit from its own group up to the root. Version 1: the limits that a container
    sees as its own.
    """
    times = [(_read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us"))]
    sizes = [_read(root / "memory/memory.limit_in_bytes")]
    mine = next((line[3:] for line in _read(own).splitlines() if line.startswith("0::")), "/")
    group = root / mine.lstrip("/")
    for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        times.append((quota, period))
        sizes.append(_read(folder / "memory.max"))
    quotas = [int(quota) / int(period) for quota, period in times if quota.isdecimal() and period.isdecimal()]
    # Version 1 shows no limit as a number close to 2**63.
    limits = [int(text) for text in sizes if text.isdecimal() and int(text) < 1 << 60]
    return min(quotas, default=None), min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
