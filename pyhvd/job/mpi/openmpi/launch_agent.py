"""``python -m pyhvd.job.mpi.openmpi.launch_agent HOST COMMAND``: mpiexec calls it instead of ssh.

The agent asks the driver to run the command beside the first Spark task of the host, and exits with the
command's exit code. The task sends the command's output to the driver. Only pyhvd.spark.run uses the agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pyhvd.job.job_key import call_driver
from pyhvd.job.messages import Exit, Launch, RankProxy, decode_from_driver, encode
from pyhvd.transport.tcp.session import ChannelError


def parse(arguments: Sequence[str]) -> Launch:
    """Return mpiexec's request, from arguments such as ssh has: ``[-x] HOST WORD...``."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words.pop(0)
    if len(words) < 2:
        raise ValueError(f"expected a host and a command, got {' '.join(arguments)!r}")
    return Launch(words[0], " ".join(words[1:]))


def run(who: str, introduce: Callable[[], Launch | RankProxy]) -> int:
    """Introduce this process to the driver, and return the exit code that the driver sends.

    Return 1 if the driver is gone, or if this process was not started by mpiexec.
    """
    try:
        message = introduce()
        driver = call_driver()
        driver.send(encode(message))
        while driver.open:
            driver.wait()
            driver.pump_out()
            for record in driver.pump_in():
                answer = decode_from_driver(record)
                if isinstance(answer, Exit):
                    return answer.code
    except (ChannelError, OSError, ValueError) as exc:
        print(f"pyhvd: {who}: {exc}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(run("launch agent", lambda: parse(sys.argv[1:])))
