"""``horovod.runner``."""

from pyhvd.aliases.as_horovod import run as run
