"""pyhvd under Horovod's names: ``import horovod.torch as hvd`` without a change of the program.

These modules are imported as ``horovod``, ``horovod.torch`` and so on: by the distribution ``pyhvd-horovod``,
or by ``pyhvdrun --as-horovod``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pyhvd
from pyhvd.aliases import absent as _absent

_absent.install()
__version__ = f"0.28.1+pyhvd{pyhvd.__version__}"
__pyhvd__ = True
"""Tells it from Horovod itself."""

_WITHOUT_EFFECT = ("disable_cache", "mpi_args", "use_gloo", "use_mpi")
_RENAMED = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
    "nics": "network_interfaces",
}
_STARTS_ELASTIC = ("min_num_proc", "host_discovery_script", "discovery")
_OF_ELASTIC = ("max_num_proc", "slots", "reset_limit", "cooldown_range", "elastic_timeout")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on ranks, and return their results in rank order; see :func:`pyhvd.launch`.

    The parameters have Horovod's order. `options` are other parameters of :func:`pyhvd.launch`, and ``nics``.
    ``disable_cache``, ``mpi_args``, ``use_gloo`` and ``use_mpi`` have no effect.
    """
    given = locals()
    given |= given.pop("options")
    call = [given.pop(name) for name in ("func", "args", "kwargs")]
    for old, new in _RENAMED.items():
        value = given.pop(old, None)
        given[new] = value if given.get(new) is None else given[new]
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("use_gloo") and given.get("use_mpi"):
        raise ValueError("horovod.run: use_gloo and use_mpi exclude each other: leave both out")
    without = [name for name in _WITHOUT_EFFECT if given.pop(name, None)]
    if not any(name in given for name in _STARTS_ELASTIC):
        without += [name for name in _OF_ELASTIC if given.pop(name, None) is not None]
    for name in without:
        why = "is for elastic jobs, with min_num_proc" if name in _OF_ELASTIC else "is not needed by pyhvd"
        warnings.warn(f"horovod.run: {name} has no effect: it {why}", stacklevel=2)
    given["verbose"] = int(given.get("verbose", 0))
    return pyhvd.launch(*call, **given)
