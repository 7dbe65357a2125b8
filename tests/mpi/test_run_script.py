"""A script under ``python -m pyhvd.run`` sees the same environment as under python."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest

from pyhvd.common.kernel import cgroup_limits
from pyhvd.job.mpi.rank_env import OPENMPI
from tests.mpi.run_support import LIBRARY, ROOT, bare, pyhvdrun, run, script

SHOW = """
    import json, os, sys
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
        print(json.dumps({
            "argv": sys.argv, "path0": sys.path[0], "file": globals().get("__file__"), "name": __name__,
            "mpi": "mpi4py.MPI" in sys.modules, "numpy": "numpy" in sys.modules,
            "job_dir": os.environ.get("PYHVD_JOB_DIR"), "threads": os.environ.get("OMP_NUM_THREADS"),
        }))
"""


def seen(out: str) -> dict[str, object]:
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_script_and_arguments(tmp_path: Path, launched: bool) -> None:
    path = script(tmp_path, SHOW)
    arguments = [path, "--lr", "0.1", "-n", "9", "-m", "x", "--help"]
    ended = pyhvdrun("-n", 2, *arguments) if launched else bare(2, *arguments)
    assert ended.code == 0, ended.err
    found = seen(ended.out)
    assert found["argv"] == arguments
    assert found["path0"] == os.path.realpath(tmp_path)
    assert found["file"] == path
    assert found["name"] == "__main__"
    assert found["job_dir"] is None


NUMBERS = """
    import json, os
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    print(json.dumps({name: os.environ.get("HOROVOD_" + name) for name in names}))
"""


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_libraries_find_the_variables_of_horovod(tmp_path: Path, launched: bool) -> None:
    path = script(tmp_path, NUMBERS)
    outer = {"HOROVOD_RANK": "7", "HOROVOD_CROSS_RANK": "3"}  # of a job that this one is started in
    ended = pyhvdrun("-n", 2, path, env=outer) if launched else bare(2, path, env=outer)
    assert ended.code == 0, ended.err
    found = sorted((json.loads(line) for line in ended.out.splitlines()), key=lambda each: each["RANK"])
    assert found == [
        {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
        | {"CROSS_RANK": "0", "CROSS_SIZE": "1", "HOSTNAME": os.uname().nodename}
        for rank in ("0", "1")
    ]


@pytest.mark.any_mpi
def test_script_that_does_not_ask_for_mpi_gets_none(tmp_path: Path) -> None:
    found = seen(pyhvdrun("-n", 2, script(tmp_path, SHOW)).out)
    assert found["mpi"] is False


@pytest.mark.any_mpi
def test_module(tmp_path: Path) -> None:
    script(tmp_path, SHOW, "shower.py")
    ended = pyhvdrun("-n", 1, "-m", "shower", "a", "-v", cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = seen(ended.out)
    assert found["argv"] == [str(tmp_path / "shower.py"), "a", "-v"]
    assert found["path0"] == str(tmp_path)
    assert found["name"] == "__main__"


@pytest.mark.any_mpi
def test_code(tmp_path: Path) -> None:
    ended = pyhvdrun("-n", 1, "-c", "import sys; print(sys.argv, repr(sys.path[0]), __name__)", "a", "-c")
    assert ended.code == 0, ended.err
    assert ended.out == "['-c', 'a', '-c'] '' __main__\n"


@pytest.mark.any_mpi
def test_folder_with_main(tmp_path: Path) -> None:
    script(tmp_path, "print('in', __name__)", "__main__.py")
    assert pyhvdrun("-n", 1, tmp_path).out == "in __main__\n"


def test_ranks_form_one_world(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        total = world.allreduce(world.rank)
        if world.rank == 0:
            print(world.size, total)
        """,
    )
    assert pyhvdrun("-n", 4, path).out == "4 6\n"
    assert bare(4, path).out == "4 6\n"


def test_stdin_reaches_rank_0(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
            print(*[line.strip() for line in sys.stdin])
        """,
    )
    ended = pyhvdrun("-n", 2, path, stdin="one\ntwo\n")
    assert (ended.code, ended.out) == (0, "one two\n"), ended.err


def test_output_comes_line_by_line(tmp_path: Path) -> None:
    """The output of a rank before it was killed is complete, although stdout is a pipe."""
    ended = pyhvdrun("-n", 1, "-c", "import os; print('so far'); os.kill(os.getpid(), 9)")
    assert ended.out.startswith("so far\n")


@pytest.mark.any_mpi
def test_multiprocessing_spawn_in_a_rank(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """,
    )
    ended = pyhvdrun("-n", 1, path)
    assert (ended.code, ended.out) == (0, "[2, 4]\n"), ended.err


REFUSED = (
    "init() was called in process N, a child of rank 1{}: it has inherited the rank's variables, but only the"
    " rank itself can call init(). If multiprocessing has started it, guard init() with 'if __name__ =="
    ' "__main__":\', as such a child imports the program again. A child that is no part of this job needs'
    " another environment: env=pyhvd.child_environment()"
)
CHILDREN = """
import multiprocessing, os, subprocess, sys
import numpy as np
import pyhvd as hvd

def init():
    try:
        hvd.init()
    except hvd.NotInitializedError as exc:
        return str(exc)
    return f"{hvd.size()} {hvd.allreduce(np.ones(1), op=hvd.Sum)}"

def put(pipe):
    pipe.send(init())

def by_multiprocessing(method):
    context = multiprocessing.get_context(method)
    mine, its = context.Pipe()
    child = context.Process(target=put, args=(its,))
    child.start()
    text = mine.recv()
    child.join()
    return text

def by_command(*words, **options):
    return subprocess.run([*words, __file__, "child"], stdout=subprocess.PIPE, text=True, **options).stdout

if sys.argv[1:] == ["child"]:
    print(init(), end="\\n")
elif __name__ == "__main__":
    hvd.init()
    if hvd.rank() == 1:
        print("rank", os.getpid())
        python, job = [sys.executable], [sys.executable, "-m", "pyhvd.run", "-n", "2"]
        refused = [by_command(*python), by_command(*python, close_fds=False), by_multiprocessing("spawn")]
        alone = by_command(*python, env=hvd.child_environment())
        jobs = [by_command(*job), by_command(*job, env=hvd.child_environment())]
        hvd.barrier()
        hvd.shutdown()
        refused.append(by_multiprocessing("fork"))
        print(repr((refused, alone, jobs)))
    else:
        hvd.barrier()
"""


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_a_child_of_a_rank_is_not_the_rank(tmp_path: Path, launched: bool) -> None:
    """init() refuses there, whatever the child has inherited. But a child can be, or start, another job."""
    path = script(tmp_path, CHILDREN)
    ended = pyhvdrun("-n", 2, path) if launched else bare(2, path)
    assert ended.code == 0, ended.err
    first, last = ended.out.splitlines()
    rank = first.split()[1]
    refused, alone, jobs = ast.literal_eval(last)
    for text in refused:
        texts = [REFUSED.format(which) for which in ("", f" (process {rank})")]
        assert re.sub(r"process \d+,", "process N,", text.strip()) in texts
    assert alone == "1 [1.]\n"
    assert jobs == ["2 [2.]\n2 [2.]\n"] * 2
    assert "PMI" not in ended.err


def test_a_program_that_a_rank_starts_may_be_the_rank(tmp_path: Path) -> None:
    """The first process that calls init() is the rank, also below a shell or a program that does not."""
    path = script(
        tmp_path,
        "import numpy as np, pyhvd as hvd\nhvd.init()\n"
        "print(f'{hvd.allreduce(np.ones(1), op=hvd.Sum)}\\n', end='', flush=True)\n",
    )
    ended = pyhvdrun("-n", 2, "-c", f"import os, sys; os.system(f'{{sys.executable}} {path}; true')")
    assert (ended.code, ended.out) == (0, "[2.]\n[2.]\n"), ended.err


@pytest.mark.parametrize("launcher", ["mpiexec", "pmi"])
def test_files_of_the_working_directory_shadow_nothing_of_the_launcher(launcher: str, tmp_path: Path) -> None:
    """Not even a source tree of pyhvd; the script's own folder is on the path, and PYTHONPATH after it."""
    for name in ("token.py", "selectors.py", "pyhvd/__init__.py", "numpy.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError(__file__)\n")
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "beside.py").write_text("here = True\n")
    path = script(folder, "import beside, sys, pyhvd as hvd\nhvd.init()\nprint(sys.path[:2])\n")
    flags = ("--launcher", launcher) if launcher == "pmi" and LIBRARY.family != OPENMPI else ()
    program = Path(sys.executable).parent / "pyhvdrun"
    ended = run([sys.executable, str(program), "-n", "2", *flags, path], cwd=tmp_path)
    assert ended.code == 0, ended.err
    shown = [line.rpartition(">:")[2] or line for line in ended.out.splitlines()]
    assert shown == [str([str(folder), str(ROOT)])] * 2


def test_omp_num_threads_is_set_and_said_once(tmp_path: Path) -> None:
    usable = len(os.sched_getaffinity(0))
    cores = max(1, int(min(usable, cgroup_limits()[0] or usable)))
    path = script(tmp_path, SHOW)
    for ended in (pyhvdrun("-n", 2, path), pyhvdrun("-n", 4, path)):
        threads = seen(ended.out)["threads"]
        said = [line for line in ended.err.splitlines() if "OMP_NUM_THREADS" in line]
        assert len(said) == 1
        assert said[0].startswith(f"pyhvd: OMP_NUM_THREADS={threads} on each rank (")
        assert f"{usable} cores, " in said[0]
    assert threads == str(max(1, cores // 4))


@pytest.mark.any_mpi
def test_omp_num_threads_of_the_user_stays(tmp_path: Path) -> None:
    ended = pyhvdrun("-n", 2, script(tmp_path, SHOW), env={"OMP_NUM_THREADS": "7"})
    assert seen(ended.out)["threads"] == "7"
    assert ended.err == ""
