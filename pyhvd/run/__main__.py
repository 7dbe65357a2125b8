"""``python -m pyhvd.run`` and ``pyhvdrun``: a rank under mpiexec, the launcher elsewhere."""

from __future__ import annotations

import os
import sys

from pyhvd.common.standard_files import fill_standard_files, say
from pyhvd.job.mpi.rank_env import OTHER, RankEnv, find_rank_process, read_rank_env
from pyhvd.run.cli import parse, usage_error, without_python
from pyhvd.run.hosts.clusters.detection import explain_torchrun, find_rank, has_marks
from pyhvd.run.options import Options


def main() -> int:
    """Run the command line in ``sys.argv``; return the exit code."""
    fill_standard_files()
    rank_env, launcher, alone = _find_rank()
    options = parse(
        sys.argv[1:],
        under_mpiexec=rank_env is not None and not alone,
        launcher=launcher,
        tells=rank_env is None or rank_env.rank == 0,
    )
    if alone and options.starts_ranks:
        rank_env = None
    if options.check_build:
        from pyhvd.run.check_build import check_build

        return check_build(verbose=options.verbose) if rank_env is None or rank_env.rank == 0 else 0
    if rank_env is None:
        try:
            return _launch(options)
        except KeyboardInterrupt:  # before the launcher handles signals, or after
            say("pyhvd: ended by SIGINT")
            return 130
    if options.show_config:
        if rank_env.rank == 0:
            print(f"rule: {launcher} has started this process as {rank_env.title}")
        return 0
    _enter(options)
    from pyhvd.run.entry.rank_entry import run_rank

    return run_rank(options, rank_env)


def horovodrun() -> int:
    """Run a command line of horovodrun in ``sys.argv``; return the exit code."""
    sys.argv[:] = ["horovodrun", *sys.argv[1:]]  # its name in texts; horovod.runner.launch calls this too
    sys.argv[1:] = without_python(sys.argv[1:])
    return main()


def _enter(options: Options) -> None:
    """Go to the directory of ``--chdir``."""
    if options.directory is not None:
        try:
            os.chdir(options.directory)
        except OSError as exc:
            usage_error(f"argument --chdir: {exc.strerror}: {options.directory}")


def _find_rank() -> tuple[RankEnv | None, str, bool]:
    """Return this rank's numbers, or None; its launcher; and whether the process may as well be a shell."""
    rank_env = read_rank_env()
    if (rank_env is None or rank_env.launcher == OTHER) and has_marks(os.environ):
        rank = find_rank(os.environ)
        if rank is not None:
            return rank.numbers, rank.launcher, rank.alone
    if rank_env is not None and find_rank_process():  # a program of a rank has started this process
        return None, "", False
    return rank_env, "mpiexec", False


def _launch(options: Options) -> int:
    """Start the ranks, or show where they would run; return the exit code."""
    if options.elastic.discovery_script is not None:
        from pyhvd.run.launchers.elastic import run as run_elastic

        return run_elastic(options)
    here = options.num_proc is not None and not options.chooses_hosts and options.launcher != "pmi"
    away = not here or options.elastic.wanted or options.show_config or has_marks(os.environ)
    if options.num_proc is None or away:
        return _launch_on_hosts(options)
    return _launch_here(options, options.num_proc)


def _launch_on_hosts(options: Options) -> int:
    """Start the ranks on the hosts that the user or the cluster gives; return the exit code."""
    from pyhvd.run.hosts.clusters.results import Surroundings
    from pyhvd.run.hosts.hosts import HostsError
    from pyhvd.run.hosts.selection import describe, find_own, read_file, select

    refusal = explain_torchrun(os.environ)
    if refusal is not None:
        usage_error(refusal)
    try:
        selection = select(options, Surroundings(os.environ, read_file, options.slots_per_host), find_own)
    except HostsError as exc:
        usage_error(str(exc))
    if options.show_config:
        print(describe(selection))
        return 0
    if selection.placed is None:
        usage_error(selection.note)
    if options.elastic.wanted:
        from pyhvd.run.launchers.elastic import run as run_elastic

        return run_elastic(options, selection)
    if selection.placed.on_this_host and options.launcher != "pmi":
        return _launch_here(options, selection.placed.size)
    from pyhvd.run.launchers.many_hosts import run

    return run(options, selection.placed)


def _launch_here(options: Options, size: int) -> int:
    from dataclasses import replace

    from pyhvd.run.launchers.local import launch

    _enter(options)
    return launch(replace(options, num_proc=size))


if __name__ == "__main__":
    sys.exit(main())
