"""Which variables of the launcher reach the ranks on other hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from pyhvd.job.mpi.rank_env import OF_CLUSTERS, OF_RANKS

# Of the launcher's own login, terminal and devices.
_NEVER = {
    *("PWD", "OLDPWD", "SHLVL", "_", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "HOSTNAME", "DISPLAY"),
    *("LS_COLORS", "TMPDIR"),
}
_NEVER_PREFIXES = (
    *("TERM", "SSH_", "XDG_", "DBUS_", "BASH_FUNC_"),
    # Of a job that the launcher itself may be part of.
    *(*OF_RANKS, *OF_CLUSTERS, "PRTE", "HYDRA"),
)
# Credentials and settings of file systems.
_OF_STORES = ("AWS_", "AZURE_", "FSSPEC_", "GCE_", "GCLOUD_", "GOOGLE_", "HF_", "HTTP_PROXY", "HTTPS_PROXY")
_NEVER_SUFFIX = "_VISIBLE_DEVICES"
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


def to_send(environ: Mapping[bytes, bytes], settings: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the variables to send: the launcher's, but for those of its own host and job, and the settings.

    Parameters
    ----------
    environ : mapping of bytes to bytes
        The launcher's environment.
    settings : mapping of str to str
        The user's; they are sent in any case.
    """
    sent = {name: value for name, value in environ.items() if _is_sent(name)}
    sent |= {os.fsencode(name): os.fsencode(value) for name, value in settings.items()}
    return list(sent.items())


def of_stores(sent: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return those variables of :func:`to_send` that file systems of stores read."""
    return [pair for pair in sent if os.fsdecode(pair[0]).upper().startswith(_OF_STORES)]


def _is_sent(name: bytes) -> bool:
    text = os.fsdecode(name)
    if text in _NEVER or text.startswith(_NEVER_PREFIXES) or text.endswith(_NEVER_SUFFIX):
        return False
    return _NAME.fullmatch(name) is not None
