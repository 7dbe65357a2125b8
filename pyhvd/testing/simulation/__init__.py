"""The names of :mod:`pyhvd.simulation` under its earlier path."""

from pyhvd.simulation import *  # noqa: F403
from pyhvd.simulation import __all__ as __all__
