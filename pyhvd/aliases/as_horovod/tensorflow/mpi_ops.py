"""``horovod.tensorflow.mpi_ops``: the verbs, and what programs reach through it."""

from pyhvd.tensorflow import *  # noqa: F403
from pyhvd.tensorflow.mpi_ops import *  # noqa: F403
