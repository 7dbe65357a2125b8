"""A module that a zygote runs in a fork: it writes what it finds to the descriptor of its first argument."""

import atexit
import json
import os
import sys

if __name__ == "__main__":
    number = int(sys.argv[1])
    found = {
        "arguments": sys.argv[2:],
        "directory": os.getcwd(),
        "variables": dict(os.environ),
        "leads": os.getsid(0) == os.getpid(),
        "imported": "fractions" in sys.modules,
        "stdin": sys.stdin.read(),
    }
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    atexit.register(lambda: os.write(number, json.dumps(found).encode()))
    sys.exit(3)
