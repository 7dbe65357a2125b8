"""``python -P -m pyhvd.job.mpi.openmpi.launch_agent HOST COMMAND``: mpiexec calls it instead of ssh.

The launch agent runs on the driver's host. It asks the driver to have the host's agent run the command, and
exits with the command's exit code. The host's agent sends the command's output to the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pyhvd.job.messages import Exit, FromProgram, Launch, decode_from_driver, encode
from pyhvd.job.mpi.openmpi.local_server import call_server
from pyhvd.transport.tcp.session import ChannelError


def parse(arguments: Sequence[str]) -> Launch:
    """Return mpiexec's request, from arguments such as ssh has: ``[-x] HOST WORD...``."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words.pop(0)
    if len(words) < 2:
        raise ValueError(f"expected a host and a command, got {' '.join(arguments)!r}")
    return Launch(words[0], " ".join(words[1:]))


def run(who: str, introduce: Callable[[], FromProgram]) -> int:
    """Introduce this process to its server, and return the exit code that the server sends.

    Return 1 if the server is gone, or if this process was not started by mpiexec.
    """
    try:
        message = introduce()
        server = call_server()
        server.send(encode(message))
        while server.open:
            server.wait()
            server.pump_out()
            for record in server.pump_in():
                answer = decode_from_driver(record)
                if isinstance(answer, Exit):
                    return answer.code
    except (ChannelError, OSError, ValueError) as exc:
        print(f"pyhvd: {who}: {exc}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(run("launch agent", lambda: parse(sys.argv[1:])))
