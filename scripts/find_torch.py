"""Exit with 0 if the torch that pip would install here is built for CPUs alone, which is small; else with 1.

pip reads the wheel's metadata and downloads no wheel of an index that serves metadata by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--report", "-", *groups["torch"]]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        return 1
    packages = json.loads(found.stdout)["install"]
    (torch,) = (each for each in packages if each["metadata"]["name"] == "torch")
    name = torch["download_info"]["url"]
    return 0 if "+cpu" in torch["metadata"]["version"] or "-macosx_" in name else 1


if __name__ == "__main__":
    sys.exit(main())
