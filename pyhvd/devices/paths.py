"""Which way arrays on devices take: by a carrier that moves device memory itself, or through the host. Pure.

Every rank of a process set offers what it has; all come to the same choice from the same offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class Choice(NamedTuple):
    """The name of the carrier, or an empty text for the way through the host, and why."""

    carrier: str
    reason: str


def choose(offers: Sequence[Offer], known: Sequence[str], members: Sequence[int]) -> Choice:
    """Return the first carrier that all ranks can use.

    Parameters
    ----------
    offers : sequence of Offer
        By set rank.
    known : sequence of str
        Names of carriers, the best one first; the same on every rank.
    members : sequence of int
        The set's global ranks.
    """
    if obstacle := _obstacle(offers, members):
        return Choice("", obstacle)
    reason = "no library that moves device memory between ranks is known"
    for name in known:
        refusals = {members[i]: o.refusals[name] for i, o in enumerate(offers) if name in o.refusals}
        versions = {members[i]: o.carriers[name] for i, o in enumerate(offers) if name in o.carriers}
        if refusals:
            reason = f"{name} cannot be used: {_per_rank(refusals)}"
        elif len(set(versions.values())) > 1:
            reason = f"the ranks have different versions of {name}: {_per_rank(versions)}"
        else:
            return Choice(name, f"version {versions[members[0]]}")
    return Choice("", reason)


def _obstacle(offers: Sequence[Offer], members: Sequence[int]) -> str:
    """Return what stands in the way of every carrier, or nothing."""
    without = [members[i] for i, offer in enumerate(offers) if not offer.device]
    if without:
        return f"there is no device on {_ranks(without)}"
    sharing: dict[str, list[int]] = {}
    for i, offer in enumerate(offers):
        sharing.setdefault(offer.device, []).append(i)
    for group in sharing.values():
        if len(group) > 1:
            return f"{_ranks([members[i] for i in group])} share a device, {offers[group[0]].name}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _per_rank(texts: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))
