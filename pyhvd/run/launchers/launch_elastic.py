"""The arguments of ``pyhvd.launch`` for ranks and hosts that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from pyhvd.job.driver.discovery import FindsHosts, HostFinder
from pyhvd.job.rank.call import check_size, expect, read_duration
from pyhvd.job.spec import ELASTIC_TIMEOUT
from pyhvd.run.options import ElasticOptions

_COOLDOWNS_S = (1, 3600)


class Elastic(TypedDict, total=False):
    """The arguments of :func:`pyhvd.launch` for elastic jobs; Horovod's names."""

    min_num_proc: int | None
    max_num_proc: int | None
    slots: int | None
    reset_limit: int | None
    cooldown_range: tuple[int, int] | None
    host_discovery_script: str | None
    elastic_timeout: float | None
    discovery: HostFinder | None


def read_elastic(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Options that a call for an elastic job sets; none for another call.

    Raises
    ------
    TypeError, ValueError
        An argument is unknown, or wrong.
    """
    for name in given:
        if name not in Elastic.__annotations__:
            raise TypeError(f"launch() got an unexpected keyword argument {name!r}")
    known = {name: value for name, value in given.items() if value is not None}
    if not known:
        return {}
    script, finder = known.get("host_discovery_script"), known.get("discovery")
    if script is not None and finder is not None:
        raise ValueError("host_discovery_script and discovery both find the hosts: give one of them")
    if "min_num_proc" not in known and script is None and finder is None:
        raise ValueError(f"{next(iter(known))} is for elastic jobs: give min_num_proc too")
    good = finder is None or callable(finder) or isinstance(finder, FindsHosts)
    what = "a function that returns the hosts, or an object with find_available_hosts_and_slots()"
    expect(good and not isinstance(finder, type), "discovery", finder, what)
    expect(script is None or isinstance(script, str), "host_discovery_script", script, "a path, as str")
    least, most = (
        None if name not in known else check_size(known[name], name)
        for name in ("min_num_proc", "max_num_proc")
    )
    limit = known.get("reset_limit")
    expect(limit is None or (type(limit) is int and limit >= 0), "reset_limit", limit, "0 or more restarts")
    timeout = read_duration(ELASTIC_TIMEOUT, known.get("elastic_timeout"))
    cooldown: Any = known.get("cooldown_range", ElasticOptions.cooldown)
    low, high = _COOLDOWNS_S
    right = len(cooldown) == 2 and low <= cooldown[0] <= cooldown[1] <= high
    expect(right, "cooldown_range", cooldown, f"two numbers of seconds from {low} to {high}")
    slots = known.get("slots")
    expect(slots is None or (type(slots) is int and slots > 0), "slots", slots, "a whole number above 0")
    first, last = map(float, cooldown)
    options = ElasticOptions(
        least, most, script, finder, reset_limit=limit, timeout=timeout, cooldown=(first, last)
    )
    return {"elastic": options, "slots_per_host": slots}
