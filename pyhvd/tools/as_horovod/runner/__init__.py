"""``horovod.runner``."""

from pyhvd.tools.as_horovod import run as run
