"""Makes the groups of torch.distributed's backend "pyhvd", and tells torch of it.

The first group starts pyhvd, and so MPI, if the program has not. Each group is a process set that its members
alone make. Its key is torch's name of the group, with a number that counts how often the program has called
``init_process_group``: torch begins to count groups anew after ``destroy_process_group``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from pyhvd.api.lifecycle import init
from pyhvd.api.process_sets import found_process_set
from pyhvd.api.topology import is_initialized
from pyhvd.engine import context
from pyhvd.engine.context import Context
from pyhvd.errors import TransportError
from pyhvd.job.mpi.store_world import join_world
from pyhvd.native.shared_memory import hide_sites
from pyhvd.torch import rank_variables
from pyhvd.torch.distributed.point_to_point import PointToPoint
from pyhvd.torch.distributed.process_group import CpuBackend, ProcessGroup

NAME = "pyhvd"
_TAKES_BACKENDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether torch takes a backend in Python for one device, not only a whole group."""

_lives = 0  # how many default groups there have been
_sends: tuple[Context, PointToPoint] | None = None


def register() -> None:
    """Make torch.distributed know the backend; does nothing the second time."""
    if NAME.upper() not in dist.Backend._plugins:
        hide_sites(os.path.join(os.path.dirname(torch.__file__), ""))
        rank_variables.set_up()
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(options: Any, _: Any = None) -> ProcessGroup | CpuBackend:
    """Make a group, or its part for CPU tensors; torch calls it on its members.

    Parameters
    ----------
    options : torch.distributed._DistributedBackendOptions
        torch's description of the group.

    Raises
    ------
    TransportError
        MPI has found other ranks than torch.
    ValueError
        The group is to have other backends too, and torch would leave one of them out.
    """
    global _lives
    kind = CpuBackend if _is_one_of_several() else ProcessGroup
    ranks = list(options.global_ranks_in_group)
    is_default = not ranks
    if is_default:
        _lives += 1
    active = _start(options, whole=is_default)
    ranks = ranks or list(range(options.group_size))
    process_set = found_process_set(ranks, f"{_lives}.{options.group_id}")
    return kind(
        options.group_rank,
        options.group_size,
        process_set,
        options.timeout,
        _point_to_point(active),
        options.group_id,
        is_default=is_default,
    )


def _is_one_of_several() -> bool:
    """Return whether the group is to have other backends for other devices.

    torch does not tell who makes one backend of the other ones; its own frame knows them.

    Raises
    ------
    ValueError
        torch would leave one backend out, and say nothing. A group in Python replaces all of torch's group.
        Of backends that are not torch's own, a group has one.
    """
    frame = sys._getframe(2)
    config = frame.f_locals.get("backend_config")
    devices: dict[str, str] = {} if config is None else config.get_device_backend_map()
    others = {*devices.values()} - {NAME}
    if not others:
        return False
    if not _TAKES_BACKENDS:
        raise ValueError(
            f"torch {torch.__version__} would make no backend {'/'.join(sorted(others))} beside pyhvd's: call"
            f' init_process_group("{NAME}"), and new_group(backend="{min(others)}") for its tensors, or'
            " install torch 2.14 or newer"
        )
    if wrong := [device for device, name in devices.items() if name == NAME and device != "cpu"]:
        raise ValueError(f"{config}: pyhvd is a backend for cpu; choose another one for {'/'.join(wrong)}")
    custom = dist.ProcessGroup.BackendType.CUSTOM
    if foreign := sorted(
        name for name in others if dist.Backend.backend_type_map.get(name, custom) == custom
    ):
        raise ValueError(
            f"{config}: torch would use one backend for the devices of {'/'.join(foreign)} and of pyhvd: use"
            f' new_group(backend="{foreign[0]}")'
        )
    return True


def _start(options: Any, *, whole: bool) -> Context:
    """Start pyhvd if it is not up; raise TransportError if its ranks are not torch's."""
    if whole and not is_initialized():
        join_world(options.store, options.group_rank, options.group_size)
    init()
    active = context.current()
    place = active.topology
    if whole and (place.rank, place.size) != (options.group_rank, options.group_size):
        raise TransportError(
            f"torch says that this is rank {options.group_rank} of {options.group_size}, but MPI that it is"
            f" rank {place.rank} of {place.size}: start the program by one launcher"
        )
    return active


def _point_to_point(active: Context) -> PointToPoint:
    """Return what sends and receives; all ranks make the default group, and with it this."""
    global _sends
    if _sends is None or _sends[0] is not active:
        _sends = active, PointToPoint(active)
    return _sends[1]
