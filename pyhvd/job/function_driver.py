"""The driver of a job on hosts whose ranks run a function: it collects the results, and keeps the agents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from pyhvd.job.connections import Peer
from pyhvd.job.driver import JobSpec
from pyhvd.job.hosts_driver import Checked, Explain, Place, Seat
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.messages import Failed, FromAgent, Prepare, Result, ResultAck
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

    Attributes
    ----------
    exceptions : dict of int to bytes
        The pickled exceptions of the ranks that failed, as far as they could be sent.
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
        self.exceptions: dict[int, bytes] = {}
        self._results: defaultdict[int, bytearray] = defaultdict(bytearray)

    def take_result(self, rank: int) -> bytearray:
        """Return what a rank returned, pickled; after :meth:`serve`, and only once."""
        return self._results.pop(rank)

    def _prepare(self, place: Place) -> Prepare:
        return msgspec.structs.replace(super()._prepare(place), function=True, again=True)

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if isinstance(message, Result):
            if message.rank in peer.ranks:
                self._results[message.rank] += message.data
                peer.send(ResultAck(message.rank, len(message.data)))
            return
        super()._handle(peer, message)

    def _note_failure(self, failed: Failed) -> None:
        self.exceptions.setdefault(failed.report.rank, failed.exception)
        super()._note_failure(failed)
