"""Grid Engine (SGE): the hosts of a job in a parallel environment."""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Allocation, Surroundings, number, read_named
from pyhvd.run.hosts.hosts import Host, HostsError, merged


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the job: each line of PE_HOSTFILE begins with host and slots (sge_pe(5))."""
    environ = around.environ
    path = environ.get("PE_HOSTFILE")
    if not path:
        return None
    hosts = []
    for at, line in enumerate(read_named("PE_HOSTFILE", around).splitlines(), 1):
        words = line.split()
        if words:
            slots = words[1] if len(words) > 1 else ""
            if not slots.isdecimal() or int(slots) < 1:
                raise HostsError(f"{path}, line {at}: {line!r}: expected a host and its slots")
            hosts.append(Host(words[0], int(slots)))
    total = number(environ, "NSLOTS")
    given = sum(host.slots for host in hosts)
    if total is not None and total != given:
        raise HostsError(f"{path} has {given} slots, but NSLOTS={total}")
    if not hosts:
        raise HostsError(f"{path} names no host")
    return Allocation(f"SGE's job {environ.get('JOB_ID', '')}".rstrip(), merged(hosts, path))
