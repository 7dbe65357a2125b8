"""The text of ``pyhvdrun --show-config``. Pure."""

from __future__ import annotations

from pyhvd.run.hosts.hosts import Host, HostRanks
from pyhvd.run.hosts.selection import HostSelection


def describe(selection: HostSelection) -> str:
    """Return rule, hosts with slots and ranks, and the agent's command."""
    lines = [f"rule: {selection.rule}"]
    if selection.note:
        lines.append(f"note: {selection.note}")
    placed = selection.placed
    if placed is None:
        return "\n".join(lines)
    by_host = {each.host: each for each in placed.hosts}
    lines.append("hosts:")
    lines += _table([_row(host, by_host.get(host)) for host in selection.hosts])
    if placed.interface:
        lines.append(f"interface: {placed.interface}")
    unused = " (not used: all ranks are on this host)" if placed.on_this_host else ""
    return "\n".join([*lines, f"agent: {placed.agent}{unused}"])


def _row(host: Host, placed: HostRanks | None) -> list[str]:
    slots = f"{host.slots} slot{'s' if host.slots > 1 else ''}"
    if placed is None:
        return [host.destination, slots, "no rank", ""]
    first, last = placed.ranks.start, placed.ranks.stop - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return [host.destination, slots, ranks, "this host" if placed.own else ""]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
