"""``horovod.runner.launch``."""

from pyhvd.run.__main__ import main as run_commandline
from pyhvd.tools.as_horovod.common.util import gloo_built as gloo_built, mpi_built as mpi_built

__all__ = ["gloo_built", "mpi_built", "run_commandline"]
