"""pyhvd.spark.run on two simulated hosts with a network between them, and failures of hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bed import Bed, Host, bed, why_not
from tests.spark.cluster import Cluster, Place
from tests.spark.conftest import GONE_S, wait_for_ranks, wait_until_gone
from tests.spark.failing import ONE_ERROR, SILENT_S, SOON_S, fail, one_error, place, rank_number, wait
from tests.spark.session import Answer, SessionProcess

# It includes the start of the cluster, or of a host and its Spark worker.
pytestmark = pytest.mark.timeout(240)

_NAMES = ("east", "west")
# For so long a task of these sessions waits for a driver from which it receives nothing.
_DRIVER_TIMEOUT_S = 20


class Site:
    """Two hosts with a Spark worker each; master and driver run on the head host."""

    def __init__(self, made: Bed, folder: Path, stack: ExitStack) -> None:
        self.bed = made
        self._folder = folder
        self._stack = stack
        self._sessions = 0
        self._cluster = Cluster(folder, place_of(made.head))
        stack.callback(self._cluster.close)
        logs = [self._start_worker(name) for name in _NAMES]
        for log in logs:
            self._cluster.wait_for_worker(log)
        self.session = self.new_session()

    def new_session(self) -> SessionProcess:
        """Start a session on the whole cluster, in place of the previous one."""
        self._sessions += 1
        log = self._folder / f"driver-{self._sessions}.log"
        own = {"PYHVD_DRIVER_TIMEOUT": str(_DRIVER_TIMEOUT_S)}
        self.session = SessionProcess(self._cluster.url, log, 4, place_of(self.bed.head), env=own)
        self._stack.callback(self.session.close)
        return self.session

    def restart(self, host: Host) -> None:
        """Start a stopped host and its worker."""
        self.bed.start_host(host)
        self._cluster.wait_for_worker(self._start_worker(host.name))

    def _start_worker(self, name: str) -> Path:
        return self._cluster.start_worker(name, place_of(self.bed.hosts[name]), {})


def place_of(host: Host) -> Place:
    return Place(host.address, host.command)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        yield Site(stack.enter_context(bed(_NAMES, folder)), folder, stack)


def check_that_it_goes_on(site: Site, mark: dict[str, str], size: int = 4) -> None:
    """Check that the same session runs another job."""
    answer = site.session.run(rank_number, num_proc=size, env=mark, start_timeout=60)
    assert answer.results == list(range(size)), answer


def test_ranks_of_two_hosts_are_one_world(site: Site, mark: dict[str, str]) -> None:
    answer = site.session.run(place, num_proc=4, env=mark)
    hosts = [host for host, *_ in answer.results]
    assert sorted(set(hosts)) == sorted(_NAMES), answer
    assert hosts[0] == hosts[1]
    assert hosts[2] == hosts[3]
    numbers = [rest for _, *rest in answer.results]
    assert numbers == [[0, 2, 0, 2, 6], [1, 2, 0, 2, 6], [0, 2, 1, 2, 6], [1, 2, 1, 2, 6]]


# test_failures.py has all failures. These are told by the rank, its guardian and Spark's executor, each from
# another host.
@pytest.mark.parametrize("how", ["raise", "kill", "worker"])
def test_one_error_and_the_session_goes_on(
    site: Site, mark: dict[str, str], tmp_path: Path, how: str
) -> None:
    when = tmp_path / "when"
    answer = site.session.run(fail, how, str(when), num_proc=4, env=mark)
    took = answer.when - float(when.read_text())
    print(f"{how}: {took:.2f} s")
    assert answer.error == "RankFailedError", answer
    assert re.search(one_error(how), answer.text), answer
    if how == "raise":
        assert 'raise KeyError("no such column")' in answer.cause
    assert took < ONE_ERROR[how][1]
    wait_until_gone()
    check_that_it_goes_on(site, mark)


class Lost:
    """A job of four ranks whose last two ranks run on the host that will be lost."""

    def __init__(self, site: Site, mark: dict[str, str], folder: Path) -> None:
        site.session.begin(wait, str(folder), num_proc=4, env=mark)
        wait_for_ranks(folder, 4)
        self._session = site.session
        self.host = site.bed.hosts[(folder / "rank-3").read_text()]
        self.when = time.monotonic()

    def answer(self, text: str, within: float) -> None:
        """Check the job's error: its text, and that it was raised in time."""
        answer = self._session.end(60)
        took = answer.when - self.when
        print(f"{took:.2f} s")
        assert answer.error == "RankFailedError", answer
        text = rf"rank [23] of 4 on host {self.host.name} \(Spark task \d\) {text}"
        assert re.search(text, answer.text), answer
        assert took < within


# A host's processes do not end at once: its task may still tell that the rank and its guardian are gone.
_GONE = r"(is lost: its Spark task is gone|and its guardian were killed)"
_SILENT = r"has been silent for 5 s: its host is frozen, cut off or without power"


def test_a_host_crashes(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    lost = Lost(site, mark, tmp_path)
    lost.host.crash()
    try:
        lost.answer(_GONE, SOON_S)
        wait_until_gone()
        check_that_it_goes_on(site, mark, size=2)  # on the other host
    finally:
        site.restart(lost.host)
    check_that_it_goes_on(site, mark)


def test_a_host_loses_its_power(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    lost = Lost(site, mark, tmp_path)
    site.bed.power_off(lost.host)
    try:
        lost.answer(_SILENT, SILENT_S)
        wait_until_gone()
        check_that_it_goes_on(site, mark, size=2)
    finally:
        site.restart(lost.host)
    check_that_it_goes_on(site, mark)


def test_a_host_freezes(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    lost = Lost(site, mark, tmp_path)
    lost.host.freeze()
    try:
        lost.answer(_SILENT, SILENT_S)
        check_that_it_goes_on(site, mark, size=2)
    finally:
        lost.host.thaw()
    # A frozen process cannot end itself; it must do so as soon as it continues.
    wait_until_gone()
    check_that_it_goes_on(site, mark)


def test_a_host_is_cut_off(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    lost = Lost(site, mark, tmp_path)
    site.bed.cut_off(lost.host)
    try:
        lost.answer(_SILENT, SILENT_S)
        check_that_it_goes_on(site, mark, size=2)
        wait_until_gone(_DRIVER_TIMEOUT_S + GONE_S)  # still cut off
    finally:
        site.bed.rejoin(lost.host)
    check_that_it_goes_on(site, mark)


def test_too_few_slots(site: Site, mark: dict[str, str]) -> None:
    answer = site.session.run(rank_number, num_proc=5, start_timeout=2, env=mark)
    assert answer.error == "StartTimeoutError", answer
    assert answer.missing == [0, 1, 2, 3, 4]
    assert "5 of 5 Spark tasks have not started within 2 s: index 0-4. " in answer.text
    check_that_it_goes_on(site, mark)


def test_ctrl_c(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    lost = Lost(site, mark, tmp_path)
    site.session.interrupt()
    answer: Answer = site.session.end(60)
    assert answer.error == "KeyboardInterrupt", answer
    assert answer.when - lost.when < SOON_S
    wait_until_gone()
    check_that_it_goes_on(site, mark)


def test_the_driver_is_killed(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    Lost(site, mark, tmp_path)
    site.session.kill()
    wait_until_gone()
    site.new_session()
    check_that_it_goes_on(site, mark)


def test_the_host_of_the_driver_loses_its_power(site: Site, mark: dict[str, str], tmp_path: Path) -> None:
    """Ranks on other hosts end although no message from the driver reaches them."""
    Lost(site, mark, tmp_path)
    for host in site.bed.hosts.values():
        site.bed.cut_off(host)
    try:
        site.session.kill()
        wait_until_gone(_DRIVER_TIMEOUT_S + GONE_S)
    finally:
        for host in site.bed.hosts.values():
            site.bed.rejoin(host)
    site.new_session()
    check_that_it_goes_on(site, mark)
