"""Horovod's names for pyhvd; the modules are those of ``pyhvd.tools.as_horovod``."""

import pyhvd.run.horovod_name as _name
import pyhvd.tools.as_horovod as _pyhvd
from pyhvd.tools.as_horovod import *  # noqa: F403
from pyhvd.tools.as_horovod import __pyhvd__ as __pyhvd__, __version__ as __version__

if _name.explain_two_owners():
    raise ImportError(_name.explain_two_owners())
__path__ += _pyhvd.__path__  # noqa: F405 - its own
