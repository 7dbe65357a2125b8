"""Choose the backend of a process set for arrays on GPUs: NCCL if all its ranks can use it, else staging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from pyhvd.backends.gpu.nccl_bindings import load_library
from pyhvd.backends.gpu.nccl_init import Refused, open_nccl, usable_version
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.backends.host import HostBackend
from pyhvd.common.kernel import boot_id
from pyhvd.common.text import describe_ranks, list_some
from pyhvd.devices.base import DeviceBackend, DeviceContext
from pyhvd.transport.fabric import allgather_decoded

_log = logging.getLogger("pyhvd")


class RankDevice(msgspec.Struct, frozen=True, array_like=True):
    """One rank's device, and its version of NCCL.

    Attributes
    ----------
    device : str
        Equal on two ranks if, and only if, they use the same physical device; empty if the rank has none.
    name : str
        The device's name in messages, such as ``"cuda:0"``; its number counts within the process.
    nccl : str
        NCCL's version; empty if NCCL cannot be used.
    error : str
        Why NCCL cannot be used.
    """

    device: str
    name: str = ""
    nccl: str = ""
    error: str = ""


# Made here: with ranks as threads, several first uses at once may crash msgspec.
_rank_decoder = msgspec.msgpack.Decoder(RankDevice)


def open_backend(
    host: HostBackend, context: DeviceContext, members: Sequence[int], why_give_up: Callable[[], str]
) -> DeviceBackend:
    """Return a process set's backend for arrays on devices; collective over the set.

    Set rank 0 logs the choice and, if it is not NCCL, the reason. ``host`` is the set's backend for arrays in
    host memory; ``members`` are the set's global ranks. For ``why_give_up`` see :func:`open_nccl`.
    """
    ranks = allgather_decoded(host.fabric, _describe(context), _rank_decoder, "its device")
    by_host = partial(StagedBackend, host, context)
    reason = why_not_nccl(ranks, members)
    if not reason:
        try:
            backend = open_nccl(host.fabric, context, load_library(), by_host, why_give_up=why_give_up)
        except Refused as exc:
            reason = f"NCCL does not connect them: {exc}"
        else:
            _log_choice(host, f"by NCCL ({ranks[host.rank].nccl})")
            return backend
    _log_choice(host, f"through the host: {reason}")
    return by_host()


def _describe(context: DeviceContext) -> RankDevice:
    device = context.device
    identity = device.identity()
    if not identity:
        return RankDevice("")
    version = error = ""
    try:
        version = usable_version(context)
    except (ImportError, RuntimeError) as exc:
        error = str(exc)
    return RankDevice(f"{boot_id()}/{identity}", device.name, version, error)


def _log_choice(host: HostBackend, choice: str) -> None:
    if host.rank == 0:
        ranks = f"{host.size} rank{'s' if host.size > 1 else ''}"
        _log.info("arrays on the devices of %s go %s", ranks, choice)


def why_not_nccl(ranks: Sequence[RankDevice], members: Sequence[int]) -> str:
    """Return why a process set cannot use NCCL, or an empty text; ``members`` are the global ranks."""
    without = [members[i] for i, rank in enumerate(ranks) if not rank.device]
    if without:
        return f"there is no device on {describe_ranks(without)}"
    users: dict[str, list[int]] = {}
    for i, rank in enumerate(ranks):
        users.setdefault(rank.device, []).append(i)
    for group in users.values():
        if len(group) > 1:
            return f"{describe_ranks([members[i] for i in group])} share a device, {ranks[group[0]].name}"
    errors = {members[i]: rank.error for i, rank in enumerate(ranks) if rank.error}
    if errors:
        return f"NCCL cannot be used: {_list_texts(errors)}"
    versions = {members[i]: rank.nccl for i, rank in enumerate(ranks)}
    if len(set(versions.values())) > 1:
        return f"the ranks have different versions of NCCL: {_list_texts(versions)}"
    return ""


def _list_texts(texts: Mapping[int, str]) -> str:
    return list_some([f"rank {rank}: {text}" for rank, text in sorted(texts.items())], "; ")
