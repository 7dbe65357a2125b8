"""``horovod.runner.launch``."""

from pyhvd.aliases.as_horovod.common.util import gloo_built as gloo_built, mpi_built as mpi_built
from pyhvd.run.__main__ import horovodrun as run_commandline

__all__ = ["gloo_built", "mpi_built", "run_commandline"]
