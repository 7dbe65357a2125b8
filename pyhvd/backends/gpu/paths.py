"""Which way arrays on devices take: by a carrier that moves device memory itself, or through the host. Pure.

Every rank of a process set offers what it has; all come to the same conclusions from the same offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has.

    Attributes
    ----------
    device : str
        The same on two ranks if, and only if, they use the same physical device; empty where there is none.
    name : str
        The device's name in its process.
    carriers : dict of str to str
        By the name of each carrier that it knows its version.
    refusals : dict of str to str
        ... or why it cannot be used.
    """

    device: str
    name: str = ""
    carriers: dict[str, str] = {}
    refusals: dict[str, str] = {}


def obstacle(offers: Sequence[Offer], carrier: str, shares: bool, members: Sequence[int]) -> str:
    """Return what keeps the ranks of a process set from using a carrier, or nothing.

    Parameters
    ----------
    offers : sequence of Offer
        By set rank.
    carrier : str
        Its name.
    shares : bool
        Whether it lets two ranks use one device.
    members : sequence of int
        The set's global ranks.
    """
    without = [members[i] for i, offer in enumerate(offers) if not offer.device]
    if without:
        return f"there is no device on {_ranks(without)}"
    sharing: dict[str, list[int]] = {}
    for i, offer in enumerate(offers):
        sharing.setdefault(offer.device, []).append(i)
    for group in sharing.values():
        if len(group) > 1 and not shares:
            return f"{_ranks([members[i] for i in group])} share a device, {offers[group[0]].name}"
    refusals = {members[i]: o.refusals[carrier] for i, o in enumerate(offers) if carrier in o.refusals}
    versions = {members[i]: o.carriers[carrier] for i, o in enumerate(offers) if carrier in o.carriers}
    if refusals:
        return f"{carrier} cannot be used: {_per_rank(refusals)}"
    if len(set(versions.values())) > 1:
        return f"the ranks have different versions of {carrier}: {_per_rank(versions)}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _per_rank(texts: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))
