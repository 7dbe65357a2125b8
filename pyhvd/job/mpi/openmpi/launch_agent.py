"""``python -m pyhvd.job.mpi.openmpi.launch_agent HOST COMMAND``: what mpiexec calls instead of ssh; by pyhvd.spark.run alone.

It asks the driver to have the command run beside the first Spark task of that host, and ends as the command
does. What the command says goes from the task to the driver without passing here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyhvd.job.job_key import call_driver
from pyhvd.job.messages import Exit, Launch, decode_from_driver, encode
from pyhvd.transport.tcp.connection import Connection
from pyhvd.transport.tcp.session import ChannelError


def parse(arguments: Sequence[str]) -> Launch:
    """Return what mpiexec wants, from arguments such as ssh has: ``[-x] HOST WORD...``."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words.pop(0)
    if len(words) < 2:
        raise ValueError(f"expected a host and a command, got {' '.join(arguments)!r}")
    return Launch(words[0], " ".join(words[1:]))


def wait_for_exit(driver: Connection) -> int:
    """Return the exit code that the driver gives; 1 when it is gone."""
    while driver.open:
        driver.wait()
        driver.pump_out()
        for record in driver.pump_in():
            message = decode_from_driver(record)
            if isinstance(message, Exit):
                return message.code
    return 1


def main(arguments: Sequence[str]) -> int:
    """Be the agent for one host."""
    try:
        wanted = parse(arguments)
        driver = call_driver()
        driver.send(encode(wanted))
        return wait_for_exit(driver)
    except (ChannelError, ValueError) as exc:
        print(f"pyhvd: launch agent: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
