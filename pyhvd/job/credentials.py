"""How a helper of the job that no task starts (launch agent, stand-in) finds its driver: by two variables.

Its environment is the only way to it through mpiexec and its daemons that does not show the key in a command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

import msgspec

from pyhvd.job.job_key import Secret
from pyhvd.transport.tcp.connection import Address, Connection, connect
from pyhvd.transport.tcp.session import ChannelError

_ADDRESSES = "_PYHVD_SPARK_DRIVER"
_KEY = "_PYHVD_SPARK_KEY"
VARIABLES = frozenset({_ADDRESSES, _KEY})
"""Their names: for whoever passes an environment on."""


def to_environment(addresses: Sequence[Address], secret: Secret) -> Mapping[str, str]:
    """Return the variables by which :func:`call_driver` finds the driver."""
    return {_ADDRESSES: msgspec.json.encode(addresses).decode(), _KEY: secret.reveal().hex()}


def call_driver(environ: MutableMapping[str, str] = os.environ) -> Connection:
    """Connect to the driver; the variables are gone then.

    Raises
    ------
    ChannelError
        It cannot be reached, or there are no such variables.
    """
    try:
        addresses = msgspec.json.decode(environ.pop(_ADDRESSES), type=list[Address])
        key = bytes.fromhex(environ.pop(_KEY))
    except (KeyError, ValueError):
        raise ChannelError("this program is started by pyhvd.spark.run, not by hand") from None
    return connect(addresses, key)
