"""Horovod's names for pyhvd; the modules are those of ``pyhvd.aliases.as_horovod``."""

import pyhvd.aliases.as_horovod as _pyhvd
import pyhvd.run.horovod_name as _name
from pyhvd.aliases.as_horovod import *  # noqa: F403
from pyhvd.aliases.as_horovod import __pyhvd__ as __pyhvd__, __version__ as __version__

if _name.explain_two_owners():
    raise ImportError(_name.explain_two_owners())
__path__ += _pyhvd.__path__  # noqa: F405 - its own
