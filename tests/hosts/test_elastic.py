"""Elastic jobs on two simulated hosts over ssh: a host is lost, comes back, is added."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH
from tests.elastic.faults import grounds
from tests.elastic.jobs import PROGRAM, ROOT, check_finished, finish, wait_for_step
from tests.elastic.trials import try_job
from tests.hosts import sshd
from tests.hosts.sshd import Site
from tests.many_hosts import Launcher

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_library().family != MPICH, reason="elastic jobs need MPICH or Intel MPI"),
]

_HOSTS = "east:2,west:2"
_FLAGS = ("--min-np", "2", "--blacklist-cooldown-range", "1", "5")
_GONE_S = 25.0  # an agent that hears nothing ends itself after 20 s


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from sshd.east_and_west(tmp_path_factory)


@pytest.fixture
def launcher(site: Site, tmp_path: Path) -> Iterator[Launcher]:
    yield site.launcher(tmp_path)
    assert site.wait_until_gone(_GONE_S) == []


def start(
    launcher: Launcher, *flags: str, hosts: str = _HOSTS, faults: Sequence[str] = ()
) -> subprocess.Popen[str]:
    settings = ("-x", "STEP_S=0.3", "-x", f"PYTHONPATH={ROOT}")
    return launcher.start(*_FLAGS, *settings, *flags, str(PROGRAM), *faults, hosts=hosts)


def crash(site: Site) -> Callable[[], None]:
    site.west.crash()
    return lambda: site.restart(site.west)


def freeze(site: Site) -> Callable[[], None]:
    site.west.freeze()
    return site.west.thaw


def cut_off(site: Site) -> Callable[[], None]:
    site.bed.cut_off(site.west)
    return lambda: site.bed.rejoin(site.west)


def power_off(site: Site) -> Callable[[], None]:
    site.bed.power_off(site.west)
    return lambda: site.restart(site.west)


@pytest.mark.parametrize("fault", [crash, freeze, cut_off, power_off])
def test_training_goes_on_without_a_host_and_with_it_again(
    fault: Callable[[Site], Callable[[], None]], site: Site, launcher: Launcher
) -> None:
    job = start(launcher)
    wait_for_step(job, launcher.folder, 5)
    mend = fault(site)
    try:
        wait_for_step(job, launcher.folder, 8, generation=1)
    finally:
        mend()
    ended = finish(job, launcher.folder)
    check_finished(ended)
    sizes = [line.words[3] for line in ended.of("begin")]
    assert sizes[:2] == ["4", "2"], ended
    assert sizes[-1] == "4", ended
    assert "west" in ended.err, ended


def test_all_hosts_that_hold_the_state_are_lost(site: Site, launcher: Launcher) -> None:
    job = start(launcher, hosts="west:2")
    wait_for_step(job, launcher.folder, 8)  # the launcher learns of commits each second
    site.west.crash()
    site.restart(site.west)
    ended = finish(job, launcher.folder)
    assert ended.code == 1, ended
    assert "every host that held commit" in ended.err.splitlines()[-1], ended


def test_a_lost_host_of_the_launcher_leaves_nothing(site: Site, tmp_path: Path) -> None:
    """The agents of the other hosts hear nothing for PYHVD_DRIVER_TIMEOUT, and end themselves."""
    east = site.bed.hosts["east"]
    launcher = site.launcher(tmp_path, east, {"PYHVD_DRIVER_TIMEOUT": "20"})
    job = start(launcher)
    wait_for_step(job, tmp_path, 5)
    site.bed.power_off(east)
    try:
        assert site.wait_until_gone(_GONE_S) == []
    finally:
        job.kill()
        job.communicate()
        site.restart(east)


def test_random_faults() -> None:
    """Its hosts are its own: those of other tests may have files that a loss of power has left."""
    with grounds(hosts=True) as (ground,):
        trial = try_job(ground, seed=7, steps=120)
    assert (trial.wrong, trial.log) == ([], "")
