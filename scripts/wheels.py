"""Build the sdist, and from it wheels for Linux, with zig as the compiler; try those that run here.

There is a wheel for each Python on this machine of those that pyhvd promises, and for each of x86_64 and
aarch64. zig (the wheel ziglang) brings glibc 2.28 and headers of both, so no container is needed. A wheel is
checked by auditwheel for manylinux_2_28, for its four extensions, and for sources, which it must not have.
Wheels of this machine's processor are installed into an empty venv and run on two ranks without a compiler;
the others are built only, and the table says so. ``pyhvd-horovod``, which has no extension, comes with them.

    python scripts/wheels.py                       # into dist/
    python scripts/wheels.py --python 3.11 --machine x86_64
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from find_python import find

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
MACHINES = ("x86_64", "aarch64")
TAG = "manylinux_2_28"
EXTENSIONS = ("_fusion", "native/shared_memory", "native/_jax_ops", "native/_tensorflow_ops")
SOURCES = (".c", ".cpp", ".hpp", ".pyx", ".pxi")
_TOOLS = {"zigcc": "cc -target {target}", "zigcxx": "c++ -target {target}", "zigar": "ar"}
_TRIAL = """
import numpy as np
import pyhvd as hvd
hvd.init()
assert hvd.size() == 2
for dtype in ("f4", "f8", "f2", "i4"):
    total = hvd.allreduce(np.full(100_000, hvd.rank() + 1, dtype), op=hvd.Sum, name=dtype)
    assert (total == 3).all()
"""


@dataclass
class Made:
    """A wheel or the sdist, and what was tried with it."""

    path: Path
    tried: str = "built only"


def say(text: str) -> None:
    """Tell the progress."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return what it prints; show that if it fails."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return str(done.stdout)


def make_sdist(out: Path) -> Path:
    """Build the sdist, and return it."""
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", code, out, cwd=ROOT).splitlines()[-1]
    return out / name


def compilers(machine: str, folder: Path) -> dict[str, str]:
    """Write commands of zig into a folder; return the variables that make setuptools take them."""
    folder.mkdir(parents=True)
    for name, arguments in _TOOLS.items():
        target = arguments.format(target=f"{machine}-linux-gnu.2.28")
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {target} "$@"\n')
        (folder / name).chmod(0o755)
    caches = {f"ZIG_{kind}_CACHE_DIR": str(ROOT / "build" / "zig" / "cache") for kind in ("GLOBAL", "LOCAL")}
    return caches | {
        "CC": str(folder / "zigcc"),
        "CXX": str(folder / "zigcxx"),
        "LDSHARED": f"{folder / 'zigcc'} -shared",
        "LDCXXSHARED": f"{folder / 'zigcxx'} -shared",
        "AR": str(folder / "zigar"),
        "CFLAGS": "-g0",
        "LDFLAGS": "-s",
    }


def for_machine(python: Path, machine: str) -> dict[str, str]:
    """Return the variables by which a Python builds for a machine that is not its own."""
    if machine == platform.machine():
        return {}
    suffix = run(python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))").strip()
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace(platform.machine(), machine),
    }


def build_wheel(python: Path, sdist: Path, machine: str, out: Path) -> Path:
    """Build the wheel of one Python and one machine, from the sdist."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-wheel-") as name:
        folder = Path(name)
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="data")
        (tree,) = folder.iterdir()
        variables = compilers(machine, folder / "tools") | for_machine(python, machine)
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "made")
        run(python, "-m", "pip", "wheel", *options, tree, env=os.environ | variables)
        (made,) = (folder / "made").iterdir()
        checked = check(made, machine)
        return Path(shutil.move(checked, out / checked.name))


def check(wheel: Path, machine: str) -> Path:
    """Return the wheel under its manylinux name; end the program if it must not have it."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    if missing := [each for each in EXTENSIONS if not any(n.startswith(f"pyhvd/{each}.") for n in names)]:
        raise SystemExit(f"{wheel.name} has no {' and no '.join(missing)}")
    if wrong := [name for name in names if name.endswith(SOURCES)]:
        raise SystemExit(f"{wheel.name} has sources: {', '.join(wrong)}")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    policy = f"{TAG}_{machine}"
    found = re.search(
        rf'consistent with\s+the\s+following\s+platform\s+tag:\s+"manylinux_2_(\d+)_{machine}"', shown
    )
    if found is None or int(found[1]) > int(TAG.rpartition("_")[2]):
        raise SystemExit(f"{wheel.name} is not {policy}:\n{shown}")
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", policy, wheel)
    (named,) = wheel.parent.iterdir()
    return named


def try_wheel(made: Made, python: Path) -> None:
    """Install a wheel with MPICH into an empty venv, and run it on two ranks, with no compiler on PATH."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-trial-") as name:
        venv, program = Path(name) / "venv", Path(name) / "trial.py"
        program.write_text(_TRIAL)
        run(python, "-m", "venv", venv)
        alone = {**os.environ, "PATH": str(venv / "bin")}
        pip = (venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        run(*pip, "--only-binary=:all:", f"{made.path}[mpich]", env=alone)
        run(venv / "bin" / "pyhvdrun", "-np", "2", program, env=alone, cwd=name, timeout=120)
    made.tried = "installed, and run on 2 ranks"


def build_all(versions: list[str], machines: list[str], out: Path) -> list[Made]:
    """Build and try a wheel for each Python and machine; a Python that is not here is left out."""
    say("sdist")
    sdist = make_sdist(out)
    made = [Made(sdist, "all wheels are built from it")]
    for version in versions:
        found = find(version)
        if found is None:
            say(f"Python {version}: not on this machine")
            continue
        with tempfile.TemporaryDirectory(prefix="pyhvd-build-") as venv:
            run(found, "-m", "venv", venv)
            python = Path(venv) / "bin" / "python"
            run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1")
            run(python, "-m", "pip", "install", "--quiet", "--group", "build", cwd=ROOT)
            for machine in machines:
                say(f"Python {version}, {machine}")
                made.append(Made(build_wheel(python, sdist, machine, out)))
                if machine == platform.machine():
                    try_wheel(made[-1], Path(found))
    say("pyhvd-horovod")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT / "compat" / "horovod")
    made += [Made(each) for each in out.glob("pyhvd_horovod-*.whl")]
    return made


def main() -> int:
    """Build, try, and print a table; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only this one; may be repeated")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to write (default: dist/)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty: old wheels would be taken for new ones")
    made = build_all(given.python or list(VERSIONS), given.machine or list(MACHINES), given.out)
    for each in made:
        print(f"{each.path.name:<75} {each.path.stat().st_size / 1e6:5.2f} MB  {each.tried}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
