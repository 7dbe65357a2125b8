"""The command that starts an agent on a host: a template such as ``ssh {host} {command}``, and its failures.

All is pure.

Invariants
----------
1. The template is split into words as a shell does it, before anything is put in. So no host and no command
   can add a word.
2. ``{command}`` becomes one word, a command line for a shell. ssh hands it to the login shell. Other programs
   start their arguments themselves, and need ``sh -c {command}``.
"""

from __future__ import annotations

import os
import re
import shlex

from pyhvd.job.spec import PYTHON, SSH_PORT, START_TIMEOUT, NameOf, flag_of

SSH = (
    "ssh -T -x -o BatchMode=yes -o ConnectTimeout=10 -o LogLevel=ERROR -o ClearAllForwardings=yes"
    " {host} {command}"
)
"""The agent's command where neither the user nor the cluster gives another."""

# What ssh says while a host is not up yet, or its sshd has too many connections.
_MAY_PASS = re.compile(
    r"connection refused|could not resolve|name or service not known|timed out|no route to host"
    r"|network is unreachable|connection reset|connection closed by|kex_exchange_identification|broken pipe",
    re.IGNORECASE,
)


def ssh_command(port: int | None = None, identity_file: str | None = None) -> str:
    """Return :data:`SSH` with the port of the hosts' sshd, and with the file of the private key."""
    words = [] if port is None else ["-p", str(port)]
    if identity_file is not None:
        words += ["-i", os.path.expanduser(identity_file)]
    return SSH.replace(" {host}", "".join(f" {shlex.quote(word)}" for word in words) + " {host}")


def check_agent(template: str) -> str:
    """Return the template; raise ValueError if it cannot be split, or lacks ``{host}`` or ``{command}``."""
    try:
        words = shlex.split(template)
    except ValueError as exc:
        raise ValueError(f"{exc}: {template!r}") from None
    for name in ("{host}", "{command}"):
        if not any(name in word for word in words):
            raise ValueError(f"{name} is missing in {template!r}: give e.g. 'ssh {{host}} {{command}}'")
    return template


def agent_command(template: str, host: str, command: str) -> list[str]:
    """Return the words of the command that runs a shell's command line on a host.

    Parameters
    ----------
    template : str
        A template that :func:`check_agent` accepts.
    host : str
        The host, with its user if one was given.
    command : str
        The command line for the shell on that host.
    """
    inserted = {"{host}": host, "{command}": command}
    return [_fill(word, inserted) for word in shlex.split(template)]


def _fill(word: str, inserted: dict[str, str]) -> str:
    """Replace the placeholders of one word; text that was put in is not searched again."""
    before, at, after = word.partition("{")
    if not at:
        return word
    for name, value in inserted.items():
        if (at + after).startswith(name):
            return before + value + _fill((at + after)[len(name) :], inserted)
    return before + at + _fill(after, inserted)


def explain(host: str, code: int, said: str, name_of: NameOf = flag_of) -> tuple[str, bool]:
    """Return why the command for a host failed, with the remedy, and whether that may pass.

    Parameters
    ----------
    host : str
        The host.
    code : int
        The command's exit code; negative for a signal.
    said : str
        What the command, or the host's login shell, wrote.
    name_of : NameOf
        The names of options.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"exit code {code}, and no word"
    if "Host key verification failed" in said or "IDENTIFICATION HAS CHANGED" in said:
        return f"{last} Run 'ssh {host}' once, and compare the key with the host's", False
    if "Permission denied" in said and code == 255:
        return f"{last} Does 'ssh -o BatchMode=yes {host} true' work? Copy your key with ssh-copy-id", False
    if code == 255 and _MAY_PASS.search(said):
        options = f"{name_of(START_TIMEOUT)}, {name_of(SSH_PORT)}"
        return f"{last}. Is the host up, and its sshd? ({options})", True
    if "No module named" in said and "pyhvd" in last:
        return f"{last}: install pyhvd for this Python there, or name another with {name_of(PYTHON)}", False
    if code == 127 or "not found" in last or "No such file" in last:
        return f"{last}: the launcher's Python is not there; name that host's with {name_of(PYTHON)}", False
    return f"the agent did not start: {last}", False
