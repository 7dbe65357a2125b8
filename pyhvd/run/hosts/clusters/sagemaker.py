"""SageMaker: the hosts of a training job, as sagemaker-training's ENVIRONMENT_VARIABLES.md describes them."""

from __future__ import annotations

import json

from pyhvd.run.hosts.clusters.results import Allocation, Surroundings, number
from pyhvd.run.hosts.hosts import Host, HostsError


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the training job, with a slot for each GPU, or one.

    Raises
    ------
    HostsError
        SM_HOSTS is malformed, or this is not the first host: SageMaker runs the program on every host.
    """
    environ = around.environ
    text = environ.get("SM_HOSTS")
    current = environ.get("SM_CURRENT_HOST")
    if not text or not current:
        return None
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise HostsError(f"cannot read SM_HOSTS={text!r}")
    if current != names[0]:
        raise HostsError(
            f"SageMaker runs this program on every host: start the job on {names[0]} only, not on {current},"
            " or choose other hosts"
        )
    slots = around.slots_per_host or number(environ, "SM_NUM_GPUS") or 1
    hosts = tuple(Host(name, slots) for name in names)
    return Allocation("SageMaker", hosts, interface=environ.get("SM_NETWORK_INTERFACE_NAME", ""))
