"""Which way a process set's arrays on devices take: its ranks offer what they have, agree, and open it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from pyhvd.backends.base import Backend
from pyhvd.backends.gpu.cuda_mpi import CudaMpiCarrier
from pyhvd.backends.gpu.device_transport import Carrier, Refused, exchange
from pyhvd.backends.gpu.nccl_init import NcclCarrier
from pyhvd.backends.gpu.paths import Offer, obstacle
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.common.processes import boot_id
from pyhvd.devices.base import Device, DeviceBackend, Packer, Stream

_log = logging.getLogger("pyhvd")

CARRIERS: list[Carrier] = [NcclCarrier()]
"""The best one first."""

ON_REQUEST: list[Carrier] = [CudaMpiCarrier()]
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
    carriers: list[Carrier] = [*CARRIERS, *(ON_REQUEST if cuda_aware_mpi else ())]
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


def _offer(carriers: Sequence[Carrier], device: Device, host: Backend) -> Offer:
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
