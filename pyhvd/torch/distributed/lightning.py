"""A strategy for Lightning: ``import pyhvd.torch.distributed.lightning``, then ``Trainer(strategy="pyhvd")``.

It is Lightning's DDPStrategy over this backend, with one CPU process for each rank, under each launcher. Its
other name is that of Horovod's strategy, "horovod". The import registers it with each Lightning that has been
imported before: ``lightning``, ``pytorch_lightning`` or both.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from pyhvd.api.lifecycle import init
from pyhvd.api.objects import broadcast_object
from pyhvd.engine import context
from pyhvd.torch.distributed import backend

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def make_store(timeout: timedelta) -> Any:
    """Return a store of torch.distributed that rank 0 serves at a free port; all ranks call this together."""
    place = context.current().topology
    own = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if place.rank == 0 else None
    host = "127.0.0.1" if place.local_size == place.size else socket.gethostname()
    address = broadcast_object((host, own and own.port), 0, name="pyhvd.lightning.store")
    return own or dist.TCPStore(*address, is_master=False, timeout=timeout)


def strategy_of(package: str) -> Any:
    """Return the strategy as a class of ``lightning.pytorch`` or of ``pytorch_lightning``."""
    base: Any = import_module(f"{package}.strategies").DDPStrategy
    environment: Any = import_module(f"{package}.plugins.environments").ClusterEnvironment

    class Environment(environment):
        """Tells Lightning the numbers of this rank, which pyhvd knows."""

        creates_processes_externally = True
        main_address, main_port = "localhost", 0  # not asked: the group has a store
        detect = staticmethod(lambda: False)

        def set_world_size(self, size: int) -> None: ...
        def set_global_rank(self, rank: int) -> None: ...

        world_size = staticmethod(lambda: context.current().topology.size)
        global_rank = staticmethod(lambda: context.current().topology.rank)
        local_rank = staticmethod(lambda: context.current().topology.local_rank)
        node_rank = staticmethod(lambda: context.current().topology.cross_rank)

    class PyhvdStrategy(base):
        """DDP over pyhvd; takes the parameters of DDPStrategy."""

        strategy_name = "pyhvd"

        def __init__(self, **options: Any) -> None:
            init()
            super().__init__(process_group_backend=backend.NAME, cluster_environment=Environment(), **options)

        @property
        def root_device(self) -> torch.device:
            if any(device.type != "cpu" for device in self.parallel_devices or ()):
                raise ValueError("the strategy trains on CPUs alone: pass Trainer(accelerator='cpu')")
            return torch.device("cpu")

        @property
        def distributed_sampler_kwargs(self) -> dict[str, int]:
            return {"num_replicas": self.world_size, "rank": self.global_rank}

        def _configure_launcher(self) -> None:
            """Start no processes: a launcher has."""

        def setup_distributed(self) -> None:
            init()
            if not dist.is_initialized():
                timeout = self._timeout
                numbers = {"rank": self.global_rank, "world_size": self.world_size}
                dist.init_process_group(backend.NAME, store=make_store(timeout), timeout=timeout, **numbers)
            super().setup_distributed()

    return PyhvdStrategy


def register() -> None:
    """Register the strategy with each Lightning that has been imported; if none has, with one that can be."""
    installed = [name for name in PACKAGES if find_spec(name)]
    for name in [name for name in installed if name in sys.modules] or installed[:1]:
        package = PACKAGES[name]
        registry, strategy = import_module(f"{package}.strategies").StrategyRegistry, strategy_of(package)
        for named in ("pyhvd", "horovod"):
            registry.register(named, strategy, description="DDP over pyhvd", override=True)


register()
