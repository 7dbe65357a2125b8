"""The commands of agents, run by stand-ins that read their arguments as the real programs do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pyhvd.run.hosts.agent_template import SSH, agent_command
from pyhvd.run.hosts.clusters import slurm, small

STAND_INS = {
    # srun reads options up to the program, and starts it without a shell.
    "srun": """\
while [ $# -gt 0 ]; do
    case "$1" in
        -w) host="$2"; shift 2 ;;
        -N1 | -n1 | --overlap | --mpi=none | --cpu-bind=none | --unbuffered) shift ;;
        -*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
        *) break ;;
    esac
done
""",
    "blaunch": """\
[ "$1" = -no-shell ] || exit 1
host="$2"; shift 2
""",
    # kubectl exec gives the program no input without -i.
    "kubectl": """\
[ "$1" = exec ] || exit 1
shift
[ "$1" = -i ] && shift || exec </dev/null
host="$1"; shift
[ "$1" = --container ] && shift 2
[ "$1" = -- ] || exit 1
shift
""",
    # flux exec takes the rank of a broker, no name.
    "flux": """\
if [ "$1 $2" = "overlay lookup" ]; then
    [ "$3" = h7 ] && echo 3
    exit
fi
[ "$1 $2 $3" = "exec -r 3" ] || exit 1
host=h7; shift 3
""",
    # ssh joins its arguments for the login shell.
    "ssh": """\
while [ $# -gt 0 ]; do
    case "$1" in
        -T | -x) shift ;;
        -o) shift 2 ;;
        -*) exit 255 ;;
        *) break ;;
    esac
done
host="$1"; shift
set -- sh -c "$*"
""",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\n{text}echo "$host" >"$HOST_FILE"\nexec "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST_FILE": str(tmp_path / "host")}


@pytest.mark.parametrize(
    "template",
    [
        SSH,
        slurm.AGENT,
        small.LSF_AGENT,
        small.FLUX_AGENT,
        small.KUBERNETES_AGENT,
        "kubectl exec -i {host} --container main -- sh -c {command}",
    ],
    ids=lambda template: template.split()[0],
)
def test_the_command_runs_on_the_host_and_gets_input(template: str, environ: dict[str, str]) -> None:
    sent = bytes(range(256)) * 5
    command = """test "a 'b' \\"c\\" \\$d" = "$(printf '%s' "a 'b' \\"c\\" \\$d")" && exec cat"""
    done = subprocess.run(
        agent_command(template, "h7", command), input=sent, capture_output=True, env=environ, timeout=30
    )
    assert done.stderr == b""
    assert done.stdout == sent
    assert Path(environ["HOST_FILE"]).read_text() == "h7\n"
