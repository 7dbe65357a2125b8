"""Agents that something else starts: here threads of this process, in Ray actors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

import pyhvd as hvd
from pyhvd.job.agent.arriving_agent import start_agent
from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.agent.rank_process import RANK_OF_CALLS
from pyhvd.job.driver.expected_agents import (
    AgentOrder,
    ExpectedAgents,
    ExpectedHosts,
    living_ranks,
    run_elastic_call,
)
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.errors import LaunchError, StartTimeoutError
from pyhvd.job.machines.roster import ElasticLimits
from pyhvd.job.mpi.rank_env import own_environment
from pyhvd.job.rank.call import module_paths
from pyhvd.job.rank.living import load_modules
from pyhvd.job.rank.pickles import dump_functions
from pyhvd.job.rank.rank import log
from pyhvd.job.spec import ElasticSpec, JobSpec, argument_of
from tests.elastic.work import SUM, train, train_until_two

pytestmark = pytest.mark.timeout(60)
HERE = "."
START_S = 120.0
ADDRESSES = ["127.0.0.1"]


class Starters:
    """Starts agents as processes of this host, each as if it were another host."""

    def __init__(self) -> None:
        self.orders: list[AgentOrder] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, order: AgentOrder) -> Callable[[], object]:
        env = own_environment(os.environ) | {"PYHVD_HOST_SALT": order.host}
        process = start_agent(order.addresses, order.secret, order.number, env)
        self.orders.append(order)
        self.processes.append(process)

        def wait() -> None:
            order.on_end(f"its starter has ended, as the agent has: code {process.wait()}")

        threading.Thread(target=wait, daemon=True).start()
        return process.kill


@contextmanager
def agents(start: Any, seconds: float = START_S) -> Iterator[ExpectedAgents]:
    with contextlib.closing(ExpectedAgents(start, ADDRESSES, seconds, "can they reach it?")) as made:
        yield made


def spec_of(function: Callable[..., Any], *args: Any, module: str = "", **given: Any) -> JobSpec:
    more = (module,) if module else ()
    code = dump_call((function, args, {}), HERE, [], module_paths(), *more)
    return JobSpec(code, True, start_timeout=START_S, name_of=argument_of, **given)


def test_living_ranks_end_when_their_host_is_lost() -> None:
    starters, got = Starters(), list[Any]()
    spec = spec_of(load_modules, module=RANK_OF_CALLS)
    lost = r"rank 1 of 2 on host west is lost: its starter is gone"
    with (
        agents(starters) as made,
        living_ranks(made, {"east": 1, "west": 1}, spec, HERE) as living,
    ):
        say = (lambda: log(os.environ["HOROVOD_HOSTNAME"])), (), dict[str, Any]()
        assert living.run(say, callbacks=[got.append]) == [None] * 2
        assert got == ["east"]
        answers = living.call(dump_functions((time.sleep, (1000,), {})))
        starters.orders[1].on_end("its starter is gone")
        with pytest.raises(hvd.RankFailedError, match=lost):
            living.results(answers)
    for process in starters.processes:
        process.wait(10)


@pytest.mark.parametrize(
    ("start", "seconds", "text"),
    [
        (lambda order: order.on_end("no room"), 30, "the agent of host east could not be started: no room"),
        (lambda _: None, 0.1, r"no agent has connected from east, west within 0\.1 s: can they reach it\?"),
    ],
)
def test_agents_that_do_not_come(start: Any, seconds: float, text: str) -> None:
    with (
        agents(start, seconds) as made,
        contextlib.closing(KeptAgents()) as kept,
        pytest.raises(LaunchError, match=text) as raised,
    ):
        made.gather({"east": 1, "west": 1}, kept)
    if isinstance(raised.value, StartTimeoutError):
        assert raised.value.missing == [0, 1]


def run(
    find: Callable[[], Mapping[str, int]],
    function: Callable[..., Any],
    *args: Any,
    starters: Callable[[AgentOrder], Callable[[], object]] | None = None,
    callbacks: Any = None,
    **limits: Any,
) -> list[Any]:
    made = ExpectedAgents(starters or Starters(), ADDRESSES, START_S, "can they reach it?")
    given: dict[str, Any] = {"min_np": 1, "max_np": 2, "start_np": 1, "name_of": argument_of} | limits
    whole = ElasticLimits(**given)
    hosts = ExpectedHosts(made, find, HERE)
    return run_elastic_call(spec_of(function, *args, elastic=ElasticSpec(2)), whole, hosts, callbacks)


def test_a_lost_agent_costs_its_host() -> None:
    starters = Starters()
    results = run(lambda: {"east": 1, "west": 1}, train, "agent", start_np=2, starters=starters)
    assert results == [(0, 1, SUM, 1)]
    for process in starters.processes:
        process.wait(10)


def test_a_host_that_comes_is_used() -> None:
    found = [{"east": 1}]
    assert run(lambda: found.pop() if found else {"east": 1, "west": 1}, train_until_two) == [
        (0, 2, 1),
        (1, 2, 1),
    ]


def test_a_callback_gets_what_rank_0_logs_and_ends_the_call() -> None:
    got: list[Any] = []

    def log_and_wait() -> None:
        for number in range(2):
            log((os.environ["HOROVOD_RANK"], number))
        time.sleep(1000)

    def take(value: Any) -> None:
        got.append(value)
        if value == ("0", 1):
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(lambda: {"east": 2}, log_and_wait, min_np=2, start_np=2, callbacks=[take])
    assert got == [("0", 0), ("0", 1)]


def test_an_agent_that_cannot_be_started_leaves_its_host_out() -> None:
    starters = Starters()

    def start(order: AgentOrder) -> Callable[[], object]:
        if order.host == "west":
            raise OSError("no such node")
        return starters(order)

    with pytest.raises(LaunchError, match=r"too few hosts (.*\n)+host west: left out .*no such node"):
        run(lambda: {"east": 1, "west": 1}, train, starters=start, min_np=2, start_np=2, elastic_timeout=0.5)
