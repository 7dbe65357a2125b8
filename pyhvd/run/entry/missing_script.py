"""What to say of a script that is not there: it may be a mistyped command."""

from __future__ import annotations

import difflib
import os
import shutil
import sys


def describe_missing(script: str, directory: str) -> str:
    """Return the error of a script that does not exist, relative to a directory."""
    if os.path.basename(script) != script or "." in script:
        python, path = os.path.basename(sys.executable), os.path.join(os.path.abspath(directory), script)
        return f"{python}: can't open file {path!r}: [Errno 2] No such file or directory"
    text = f"pyhvd: there is no Python script {script!r} in {os.path.abspath(directory)}"
    if shutil.which(script) is not None:
        return f"{text}: pyhvdrun runs Python programs only; horovodrun runs the command {script!r} too"
    meant = difflib.get_close_matches(script, ["python", "python3"], 1)
    return f"{text}, and no command of this name" + (f": did you mean {meant[0]!r}?" if meant else "")
