"""pyhvd under Horovod's names: ``import horovod.torch as hvd`` without a change of the program.

These modules are imported as ``horovod``, ``horovod.torch`` and so on: by the distribution ``pyhvd-horovod``,
or by ``pyhvdrun --as-horovod``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pyhvd

__version__ = f"0.28.1+pyhvd{pyhvd.__version__}"
__pyhvd__ = True
"""Tells it from Horovod itself."""

_WITHOUT_EFFECT = ("disable_cache", "mpi_args", "use_gloo", "use_mpi")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    nics: Any = None,
    verbose: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on ranks, and return their results in rank order; see :func:`pyhvd.launch`.

    Horovod's options ``disable_cache``, ``mpi_args``, ``use_gloo`` and ``use_mpi`` have no effect.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in _WITHOUT_EFFECT:
        if given.pop(name, None):
            warnings.warn(f"horovod.run: pyhvd does not need {name}", stacklevel=2)
    if nics is not None:
        given.setdefault("network_interfaces", nics)
    return pyhvd.launch(func, args, kwargs, np=np, num_proc=num_proc, verbose=int(verbose or 0), **given)
