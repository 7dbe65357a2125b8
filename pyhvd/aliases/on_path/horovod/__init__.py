"""Horovod's names for pyhvd; the modules are those of ``pyhvd.aliases.as_horovod``."""

import pyhvd.aliases.as_horovod as _pyhvd
from pyhvd.aliases.as_horovod import *  # noqa: F403
from pyhvd.aliases.as_horovod import __pyhvd__ as __pyhvd__, __version__ as __version__

__path__ += _pyhvd.__path__  # noqa: F405 - its own
