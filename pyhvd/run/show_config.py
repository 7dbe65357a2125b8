"""The text of ``pyhvdrun --show-config``. Pure."""

from __future__ import annotations

from pyhvd.run.hosts import Host, HostSeats
from pyhvd.run.selection import Selection


def describe(selection: Selection) -> str:
    """Return rule, hosts with slots and ranks, and the agent's command."""
    lines = [f"rule: {selection.rule}"]
    if selection.note:
        lines.append(f"note: {selection.note}")
    seats = selection.seats
    if seats is None:
        return "\n".join(lines)
    placed = {each.host: each for each in seats.hosts}
    lines.append("hosts:")
    lines += _table([_row(host, placed.get(host)) for host in selection.hosts])
    if seats.interface:
        lines.append(f"interface: {seats.interface}")
    unused = " (not used: all ranks are on this host)" if seats.on_this_host else ""
    return "\n".join([*lines, f"agent: {seats.agent}{unused}"])


def _row(host: Host, seats: HostSeats | None) -> list[str]:
    slots = f"{host.slots} slot{'s' if host.slots > 1 else ''}"
    if seats is None:
        return [host.destination, slots, "no rank", ""]
    first, last = seats.ranks.start, seats.ranks.stop - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return [host.destination, slots, ranks, "this host" if seats.own else ""]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
