"""Which way a process set's arrays on devices take: its ranks offer what they have, agree, and open it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from pyhvd.backends.base import Backend
from pyhvd.backends.gpu.cuda_mpi import CudaMpiTransport
from pyhvd.backends.gpu.device_transport import DeviceTransport, Refused, exchange
from pyhvd.backends.gpu.nccl_init import NcclTransport
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.common.processes import boot_id
from pyhvd.devices.base import Device, DeviceBackend, Packer, Stream

_log = logging.getLogger("pyhvd")

CARRIERS: list[DeviceTransport] = [NcclTransport()]
"""The best one first."""

ON_REQUEST: list[DeviceTransport] = [CudaMpiTransport()]
"""What is looked at after these, and only if it was asked for."""


def open_backend(
    host: Backend,
    device: Device,
    stream: Stream,
    packer: Packer | None,
    members: Sequence[int],
    *,
    cuda_aware_mpi: bool,
) -> DeviceBackend:
    """Return a process set's backend: the first carrier's that connects it, or the way through the host.

    Collective over the set, whose rank 0 tells of it in one line.

    Parameters
    ----------
    host : Backend
        The set's, for arrays in host memory.
    device, stream, packer
        This rank's device, its communication stream, and what moves many tensors at once.
    members : sequence of int
        The set's global ranks.
    cuda_aware_mpi : bool
        Whether MPI may be given addresses on devices; the same on every rank.
    """
    carriers: list[DeviceTransport] = [*CARRIERS, *(ON_REQUEST if cuda_aware_mpi else ())]
    mine = msgspec.msgpack.encode(_offer(carriers, device, host))
    offers = [msgspec.msgpack.decode(data, type=Offer) for data in exchange(host.fabric, mine)]
    reasons: list[str] = []
    for carrier in carriers:
        reason = obstacle(offers, carrier.name, carrier.shares, members)
        if not reason:
            try:
                backend = carrier.open(host, device, stream, packer)
            except Refused as exc:
                reason = f"{carrier.name} does not connect them: {exc}"
            else:
                version = offers[host.rank].carriers[carrier.name]
                _tell(host, f"by {carrier.name} ({version}){carrier.remark}", reasons)
                return backend
        reasons.append(reason)
    _tell(host, "through the host", reasons)
    return StagedBackend(host, device, stream, packer)


def _offer(carriers: Sequence[DeviceTransport], device: Device, host: Backend) -> Offer:
    if not device.identity():
        return Offer("")
    versions: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for carrier in carriers:
        try:
            versions[carrier.name] = carrier.version(device, host.fabric)
        except (ImportError, RuntimeError) as exc:
            refusals[carrier.name] = str(exc)
    return Offer(f"{boot_id()}/{device.identity()}", device.name, versions, refusals)


def _tell(host: Backend, way: str, reasons: Sequence[str]) -> None:
    """Tell of the way, and why it is no better one."""
    if host.rank == 0:
        ranks = f"{host.size} rank{'s' if host.size > 1 else ''}"
        why = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
        _log.info("arrays on the devices of %s go %s%s", ranks, way, why)


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
