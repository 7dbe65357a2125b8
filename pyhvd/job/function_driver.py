"""The driver of a job on hosts whose ranks run a function, and whose agents stay for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pyhvd.job.driver import JobSpec
from pyhvd.job.hosts_driver import Checked, Explain, Place, Seat
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.messages import Prepare
from pyhvd.job.network_choice import Wanted
from pyhvd.job.output import Output
from pyhvd.job.reusing_driver import ReusingDriver


class FunctionDriver(ReusingDriver):
    """Serves one job on the hosts of `seats`; see :class:`~pyhvd.job.hosts_driver.HostsDriver`.

    Parameters
    ----------
    spec : JobSpec
        What the ranks run; its `code` is that of :func:`~pyhvd.job.function_process.dump_call`.
    seats, checked, explain, display, say, network
        See :class:`~pyhvd.job.hosts_driver.HostsDriver`.
    kept : KeptAgents
        Where this job takes its agents from, as far as they are there, and leaves them.
    """

    def __init__(
        self,
        spec: JobSpec,
        seats: Sequence[Seat],
        checked: Callable[[], Checked],
        explain: Explain,
        display: Output,
        say: Callable[[str], None],
        network: Wanted,
        kept: KeptAgents,
    ) -> None:
        super().__init__(kept, spec, seats, checked, explain, display, say, None, network)

    def _prepare(self, place: Place) -> Prepare:
        return msgspec.structs.replace(super()._prepare(place), function=True, again=True)
