"""Compile all C for platforms on which no test runs: the sources, and what Cython makes of the extensions.

zig (the wheel ziglang) brings the headers of each platform. Nothing is linked or run. The objects, the copies
of headers and zig's caches are below --build.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "pyhvd" / "native" / "src"
TARGETS = ("aarch64-macos", "aarch64-linux-gnu")
EXTENSIONS = ("_fusion", "native/shared_memory")
# Of setup.py; for generated C alone the warnings of clang are no errors.
FLAGS = ("-D_GNU_SOURCE", "-ffp-contract=off", "-fvisibility=hidden", f"-I{SRC}")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")


def generate(build: Path) -> list[Path]:
    """Make C of the extensions anew: that of a build fits the numpy of another environment."""
    made = []
    for name in EXTENSIONS:
        made.append(build / f"{Path(name).name}.c")
        command = ["cython", "-3", "-Xboundscheck=False", "-o", str(made[-1]), f"pyhvd/{name}.pyx"]
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    return made


def copy_headers(build: Path) -> list[str]:
    """Return flags for Python's and numpy's headers, whose configurations would choose by platform.

    Debian's pyconfig.h only includes that of the compiler's platform. numpy's asks for endian.h if this
    platform has it.
    """
    python, missing = build / "python", build / "missing"
    include = Path(sysconfig.get_path("include"))
    shutil.copytree(include, python, dirs_exist_ok=True)
    of_debian = include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name / "pyconfig.h"
    if of_debian.exists():
        shutil.copy(of_debian, python)
    missing.mkdir(exist_ok=True)
    (missing / "endian.h").write_text("#include <machine/endian.h>\n")
    folders = (python, numpy.get_include())
    return [*(f"-isystem{folder}" for folder in folders), f"-idirafter{missing}"]


def compile_for(target: str, build: Path, sources: list[Path], flags: list[str]) -> None:
    """Compile sources to objects in a folder of the target."""
    folder = build / target
    folder.mkdir(exist_ok=True)
    caches = {f"ZIG_{kind}_CACHE_DIR": str(build / "cache") for kind in ("GLOBAL", "LOCAL")}
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS, *flags, "-c"]
    subprocess.run([*command, *map(str, sources)], check=True, cwd=folder, env=os.environ | caches)


def main() -> int:
    """Compile for all targets; return 0, or 1 after the compiler's errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "zig", help="a folder to write into")
    build = parser.parse_args().build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    headers, generated = copy_headers(build), generate(build)
    own = sorted(SRC.glob("*/*.c"))
    try:
        for target in TARGETS:
            compile_for(target, build, own, list(WARNINGS))
            compile_for(target, build, generated, headers)
    except subprocess.CalledProcessError:
        print(f"the C does not compile for {target}: see above", file=sys.stderr)
        return 1
    print(f"compiled {len(own) + len(generated)} C files for {' and '.join(TARGETS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
