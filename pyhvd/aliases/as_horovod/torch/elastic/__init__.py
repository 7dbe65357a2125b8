"""``horovod.torch.elastic``: :mod:`pyhvd.torch.elastic`."""

import importlib as _importlib

from pyhvd.aliases.as_horovod.common.elastic import run_fn as run_fn
from pyhvd.torch.elastic import *  # noqa: F403

for _name in ("sampler", "state"):
    _importlib.import_module(f"{__name__}.{_name}")
