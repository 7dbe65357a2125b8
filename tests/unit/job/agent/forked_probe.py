"""What a guardian runs as a rank, in a fork of a zygote: it writes what it finds to its control socket."""

import atexit
import json
import os
import socket
import sys


def run_rank(control: socket.socket) -> int:
    found = {
        "directory": os.getcwd(),
        "variables": dict(os.environ),
        "in_own_session": os.getsid(0) == os.getppid(),
        "imported": "fractions" in sys.modules,
        "stdin": sys.stdin.read(),
    }
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    atexit.register(lambda: control.sendall(json.dumps(found).encode()))
    return 3
