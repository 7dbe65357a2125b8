"""Elastic states on ranks that are threads, over several generations on simulated hosts."""

from __future__ import annotations

import itertools
import linecache
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.elastic import ElasticSampler, ObjectState, State, exchange, loop, session
from pyhvd.elastic.session import current
from pyhvd.job.commits.vault import Vault, VaultError
from pyhvd.testing import RanksFailed, run_ranks
from tests.elastic_hosts import Hosts, played


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_LAST_WAIT_S", 0.0)


def vault() -> Vault:
    found = current()
    assert found is not None
    return found.vault


def values(state: Any) -> tuple[Any, ...]:
    return state.epoch, list(state.losses), state.weights.tolist()


def numbers(hosts: Hosts) -> list[int]:
    """Return the number of the newest commit of each host."""
    return [seal.number for each in hosts.vaults.values() if (seal := each.newest())]


def make(**others: Any) -> ObjectState:
    """Return a state that differs on each rank, before it is synchronised."""
    rank = hvd.rank()
    return ObjectState(**({"epoch": rank, "losses": [rank], "weights": np.full(3, float(rank))} | others))


def train(steps: int = 1, commit: bool = True) -> Any:
    @hvd.elastic.run
    def function(state: Any) -> Any:
        for _ in range(steps):
            state.epoch += 1
            state.losses.append(state.epoch)
            state.weights += 1
            if commit:
                state.commit()
        return values(state)

    return function


# -- without an elastic job ----------------------------------------------------------------------------


def test_an_ordinary_job_starts_with_rank_0s_state() -> None:
    def body() -> Any:
        assert not hvd.elastic.enabled()
        assert (hvd.elastic.generation(), hvd.elastic.max_size()) == (0, None)
        return train()(make())

    assert run_ranks(3, body) == [(1, [0, 1], [1.0] * 3)] * 3


def test_what_is_saved_in_an_ordinary_job_is_kept_by_value() -> None:
    def body() -> None:
        state = make(sampler=ElasticSampler(10))
        for keep in (state.save, state.commit):
            state.sampler.record_batch(0, 1)
            keep()
            before = values(state), state.sampler.processed_num
            state.epoch = 7
            state.losses.append("changed in place")
            state.weights += 5
            state.sampler.record_batch(0, 2)
            state.restore()
            assert (values(state), state.sampler.processed_num) == before
        state.check_host_updates()

    run_ranks(2, body)


@pytest.mark.parametrize("elastic", [False, True])
def test_what_a_state_begins_with_is_kept_by_value(elastic: bool) -> None:
    """The constructor keeps it, and so does the synchronisation at the beginning of the function."""

    def spoil(state: Any) -> None:
        state.epoch, state.losses[0] = 7, "changed in place"
        state.weights += 5
        state.sampler.record_batch(0, 2)

    def found(state: Any) -> Any:
        return values(state), state.sampler.processed_num

    @hvd.elastic.run
    def function(state: Any) -> None:
        before = found(state)
        for _ in range(2):
            spoil(state)
            state.restore()
            assert found(state) == before == ((0, [0], [0.0] * 3), 0)

    def body() -> None:
        state, rank = make(sampler=ElasticSampler(10)), hvd.rank()
        spoil(state)
        state.restore()
        assert found(state) == ((rank, [rank], [float(rank)] * 3), 0)
        function(state)

    run_ranks(2, body) if not elastic else Hosts().run([0, 1], body)


def test_restore_in_a_later_generation_goes_back_to_the_commit() -> None:
    hosts = Hosts()
    hosts.run([0, 0], lambda: train(2)(make()))

    @hvd.elastic.run
    def function(state: Any) -> Any:
        state.epoch = 50
        state.restore()
        return values(state)

    assert hosts.run([0, 1], lambda: function(make())) == [(2, [0, 1, 2], [2.0] * 3)] * 2


def test_restore_says_why_there_is_no_copy() -> None:
    class Bare(State):
        def dump(self) -> Any:
            return None

    def body() -> None:
        with pytest.raises(RuntimeError, match=r"^restore: nothing was saved or committed before$"):
            Bare().restore()
        train(1, commit=False)(make(lock=threading.Lock() if hvd.rank() else None))
        text = r"^restore: there is no copy: ObjectState cannot be pickled: attribute 'lock': TypeError: "
        with pytest.raises(RuntimeError, match=text):
            make(lock=threading.Lock()).restore()

    run_ranks(2, body)


def test_errors_pass_through_an_ordinary_job() -> None:
    @hvd.elastic.run
    def fails(state: Any, error: Exception) -> None:
        raise error

    def body() -> None:
        for error in (hvd.HostsUpdatedInterrupt(), hvd.HorovodInternalError("x"), KeyError("y")):
            with pytest.raises(type(error)):
                fails(make(), error)
        assert fails.__name__ == "fails"

    run_ranks(1, body)


def test_run_may_be_called_again() -> None:
    def body() -> Any:
        state = make()
        train()(state)
        state.epoch += 10 * hvd.rank()
        return train()(state)

    assert run_ranks(2, body) == [(2, [0, 1, 2], [2.0] * 3)] * 2
    hosts = Hosts()
    hosts.run([0, 0], body)
    assert hosts.run([0, 0], body) == [(4, [0, 1, 2, 3, 4], [4.0] * 3)] * 2


# -- generations ---------------------------------------------------------------------------------------


def test_the_next_generation_goes_on_from_the_commit() -> None:
    hosts, calls = Hosts(), list[Any]()

    def body() -> Any:
        state = make()
        state.register_reset_callbacks(
            [lambda: calls.append(values(state)), lambda: calls.append(hvd.size())]
        )
        return train(2)(state)

    assert hosts.run([0, 0, 1], body) == [(2, [0, 1, 2], [2.0] * 3)] * 3
    assert calls == []
    assert hosts.run([0, 1], body) == [(4, [0, 1, 2, 3, 4], [4.0] * 3)] * 2
    assert Counter(map(str, calls)) == {str((2, [0, 1, 2], [2.0] * 3)): 2, "2": 2}


def test_what_is_not_committed_is_lost() -> None:
    hosts = Hosts()
    hosts.run([0, 0], lambda: train(1)(make()))
    hosts.run([0, 0], lambda: train(5, commit=False)(make()))
    assert hosts.run([0, 0], lambda: train(0)(make())) == [(1, [0, 1], [1.0] * 3)] * 2


def test_hosts_that_lack_the_commit_get_it() -> None:
    """Rank 0 is on a new host; then the host that had the commit first is lost."""
    hosts = Hosts()
    hosts.run([5], lambda: train(3)(make()))
    expected = (3, [0, 1, 2, 3], [3.0] * 3)
    assert hosts.run([1, 1, 5, 7], lambda: train(0)(make())) == [expected] * 4
    assert numbers(hosts) == [3, 3, 3]
    assert hosts.run([7, 7], lambda: train(0)(make())) == [expected] * 2


def test_a_host_that_holds_the_commit_reads_it_while_others_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics, say, differ from host to host; a commit is sent in pieces."""
    monkeypatch.setattr(exchange, "_PIECE", 64)
    hosts = Hosts()

    def body() -> Any:
        @hvd.elastic.run
        def function(state: Any) -> Any:
            if not hvd.elastic.generation():
                state.weights += hvd.rank()
                state.commit()
            return state.weights.tolist()

        return function(make())

    hosts.run([0, 1], body)
    assert hosts.run([0, 1, 1, 2, 3], body) == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_the_source_must_hold_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts()
    hosts.run([0, 1], lambda: train(1)(make()))
    monkeypatch.setattr(session.RankSession, "held", None)
    with pytest.raises(RanksFailed, match="rank 0 lacks commit 1, of which it is the source"):
        hosts.run([0, 1], lambda: train(0)(make()))


def test_a_host_that_joins_gets_the_sources_commit_though_others_are_longer() -> None:
    hosts = Hosts()

    def body() -> Any:
        state = make(name="")

        @hvd.elastic.run
        def function(state: Any) -> Any:
            before, state.name = state.name, "x" * 1000 * hvd.rank()
            state.commit()
            return before, state.weights.tolist()

        return function(state)

    hosts.run([0, 1], body)
    assert hosts.run([0, 1, 2], body) == [("", [0.0] * 3)] * 3
    assert numbers(hosts) == [2, 2, 2]


def test_agents_that_share_memory_each_keep_the_commit() -> None:
    hosts = Hosts()
    expected = (2, [0, 1, 2], [2.0] * 3)
    assert hosts.run([0, 1, 1], lambda: train(2)(make()), nodes=[0, 0, 0]) == [expected] * 3
    assert numbers(hosts) == [2, 2]
    assert hosts.run([1, 2], lambda: train(0)(make()), nodes=[0, 0]) == [expected] * 2
    assert numbers(hosts) == [2, 2]


def test_a_host_that_missed_the_last_commit_gets_it() -> None:
    hosts = Hosts()
    hosts.run([0, 1], lambda: train(2)(make()))
    other = Hosts()
    other.run([1], lambda: train(1)(make()))
    hosts.vaults[0] = other.vaults[1]  # its newest is commit 1
    assert hosts.run([0, 1], lambda: train(1)(make())) == [(3, [0, 1, 2, 3], [3.0] * 3)] * 2


def test_settings_come_from_rank_0_after_the_callbacks() -> None:
    hosts = Hosts()

    def body() -> Any:
        state = ObjectState(rate=0.5, name="a", count=np.int64(1), sizes=[1])

        def change() -> None:
            rank = hvd.rank()
            state.rate, state.name, state.count, state.sizes = hvd.size(), f"{rank}", np.int64(rank), [rank]

        state.register_reset_callbacks([change])

        @hvd.elastic.run
        def function(state: Any) -> Any:
            state.commit()
            return state.rate, state.name, int(state.count), state.sizes

        return function(state)

    assert hosts.run([0, 0], body) == [(0.5, "a", 1, [1])] * 2
    assert hosts.run([0, 0, 0], body) == [(3, "0", 0, [rank]) for rank in range(3)]


def test_callables_before_run_may_not_commit() -> None:
    def body() -> None:
        state, other = make(), make()
        for verb in ("commit", "check_host_updates"):
            with pytest.raises(RuntimeError, match=rf"^{verb}\(\) of a state with which no function"):
                getattr(state, verb)()
        train(1)(state)
        with pytest.raises(RuntimeError, match="an elastic job has one state"):
            train(1)(other)

    Hosts().run([0, 0], body)


def test_restore_goes_back_to_the_last_commit_or_save() -> None:
    def body() -> Any:
        state = make()
        train(1)(state)
        state.epoch = 50
        state.restore()
        first = state.epoch
        state.epoch = 60
        state.save()
        state.epoch = 70
        state.restore()
        second = state.epoch
        state.commit()
        state.epoch = 80
        state.restore()
        return first, second, state.epoch

    assert Hosts().run([0, 0, 1], body) == [(1, 60, 60)] * 3


# -- hosts that change ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["commit", "check_host_updates"])
def test_ranks_make_room_together(verb: str) -> None:
    """Only one host's agent has said so yet."""
    hosts = Hosts()

    @hvd.elastic.run
    def function(state: Any) -> None:
        while True:
            state.epoch += 1
            if state.epoch == 3 and hvd.rank() == 2:
                vault().wished = 1
            getattr(state, verb)()

    def body() -> Any:
        state = make()
        with pytest.raises(SystemExit) as caught:
            function(state)
        assert vault().left == 1
        return caught.value.code, state.epoch

    assert hosts.run([0, 0, 1], body) == [(0, 3)] * 3
    assert numbers(hosts) == [3 if verb == "commit" else 1] * 2
    assert hosts.run([0, 1, 2], lambda: train(0)(make()))[0][0] == 3


@pytest.mark.parametrize("again", [True, False])
def test_a_program_that_catches_the_interrupt_is_told_where(
    again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At its next commit, or when it returns; once."""

    def step(state: Any) -> None:
        state.epoch += 1
        state.commit()

    @hvd.elastic.run
    def function(state: Any) -> None:
        vault().wished = 1
        for _ in range(3 if again else 1):
            try:
                step(state)
            except Exception:
                continue

    def body() -> int:
        state = make()
        function(state)
        return int(state.epoch)

    assert Hosts().run([0, 0], body) == [3 if again else 1] * 2
    line = next(
        at for _, _, at in cast(Any, function).__wrapped__.__code__.co_lines() if at and _calls_step(at)
    )
    (said,) = [text for text in caplog.messages if "HostsUpdatedInterrupt" in text]
    assert said.startswith(f"{__file__}:{line} in test_a_program_that_catches_the_interrupt_is_told_where.")


def _calls_step(line: int) -> bool:
    return linecache.getline(__file__, line).strip() == "step(state)"


def test_a_wish_of_this_generation_is_none() -> None:
    hosts = Hosts()
    hosts.run([0], lambda: train(1)(make()))
    hosts.ask_for_room()
    assert hosts.run([0], lambda: train(1)(make()))[0][0] == 2


# -- errors --------------------------------------------------------------------------------------------


def test_different_numbers_of_commits_are_an_error_with_all_numbers() -> None:
    @hvd.elastic.run
    def function(state: Any) -> None:
        state.commit()
        state._number += hvd.rank() // 2
        state.commit()

    def body() -> str:
        with pytest.raises(hvd.MismatchError) as caught:
            function(make())
        return str(caught.value)

    expected = (
        "commit: the ranks differ (ranks 0-1: commit 2; rank 2: commit 3): every rank must call commit()"
        " after the same steps"
    )
    assert Hosts().run([0, 0, 1], body) == [expected] * 3


@pytest.mark.parametrize("kind", ["pickle", "memory"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_commit_tells_all(
    kind: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 are the first of their hosts; nothing is overwritten, and training goes on."""
    hosts = Hosts()
    reserve = Vault.reserve

    def refuse(self: Vault, size: int) -> None:
        if hvd.rank() == failing and size > 10_000:
            raise VaultError("no memory")
        reserve(self, size)

    @hvd.elastic.run
    def function(state: Any) -> str:
        state.commit()
        good = state.extra
        if hvd.rank() == failing:
            state.extra = threading.Lock() if kind == "pickle" else np.zeros(10_000)
        own = TypeError if kind == "pickle" else VaultError
        with pytest.raises(own if hvd.rank() == failing else hvd.RankFailedError) as caught:
            state.commit()
        newest = vault().newest()
        assert newest is not None
        assert newest.number == 1
        state.extra = good
        state.commit()
        hvd.barrier()
        newest = vault().newest()
        assert newest is not None
        assert newest.number == 2
        return str(caught.value)

    monkeypatch.setattr(Vault, "reserve", refuse)
    texts = hosts.run([0, 0, 1, 1], lambda: function(make(extra=None)))
    own = texts.pop(failing)
    if kind == "pickle":
        assert own.startswith("ObjectState cannot be pickled: attribute 'extra': TypeError: cannot pickle")
    name = "TypeError" if kind == "pickle" else "VaultError"
    assert texts == [f"commit: rank {failing} cannot commit its state: {name}: {own}"] * 3


def test_a_rank_0_that_cannot_send_its_state_tells_all() -> None:
    def body() -> str:
        with pytest.raises(TypeError if hvd.rank() == 0 else hvd.RankFailedError) as caught:
            train()(make(lock=threading.Lock() if hvd.rank() == 0 else None))
        hvd.barrier()
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "attribute 'lock': TypeError: cannot pickle '_thread.lock' object" in text


def test_another_state_than_that_of_the_commit_is_named() -> None:
    hosts = Hosts()
    hosts.run([0], lambda: train(1)(make(old=1, older=2)))

    def body() -> str:
        with pytest.raises(ValueError, match="the state differs") as caught:
            train(1)(make(new=1))
        return str(caught.value)

    expected = (
        "the state differs from that of the commit: not in the commit: new;"
        " in the commit alone: old, older; a program must make the same state each time that it begins"
    )
    assert hosts.run([0, 1], body) == [expected] * 2


def test_an_attribute_that_cannot_be_loaded_is_named() -> None:
    class Choosy:
        def state_dict(self) -> dict[str, int]:
            return {"size": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("size")

    hosts = Hosts()
    hosts.run([0], lambda: train(1)(make(extra=Choosy())))

    def body() -> None:
        with pytest.raises(
            ValueError, match=r"^state.extra does not fit what was committed: KeyError: 'size'$"
        ):
            train(1)(make(extra=Choosy()))

    hosts.run([0], body)


def test_attributes_that_are_not_kept_are_named() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"^a state cannot have the attribute 'commit': choose"):
            ObjectState(commit=1)
        state = make()
        text = r"^state.best is not committed, and lost .* give 'best' to ObjectState\(\) as a keyword$"
        with pytest.warns(UserWarning, match=text):
            state.best = 1.0
        state.best = 2.0
        state._own = 1

    run_ranks(1, body)


class _Plain(State):
    pass


def test_a_state_without_methods_says_which_it_needs() -> None:
    def body() -> None:
        with pytest.raises(NotImplementedError, match=r"_Plain must define dump\(\)$"):
            train()(_Plain())

    run_ranks(1, body)


# -- ranks that are lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["begin", "function"])
def test_a_rank_that_has_lost_others_calls_back_and_waits(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, calls = list[float](), list[str]()
    monkeypatch.setattr("pyhvd.elastic.loop.time.sleep", waits.append)

    class LostError(Exception):
        pass

    def body() -> None:
        state = make()
        state.register_failure_callbacks([lambda: 1 / 0, lambda: calls.append(f"rank {hvd.rank()}")])
        if hvd.rank() == 1 and where == "begin":
            raise LostError

        @hvd.elastic.run
        def function(state: Any) -> None:
            if hvd.rank() == 1:
                raise LostError
            hvd.barrier()

        if hvd.rank() == 1:
            function(state)
        with pytest.raises(hvd.RankFailedError):
            function(state)

    with pytest.raises(AssertionError, match="rank 1 of 2 raised LostError"):
        Hosts().run([0, 0], body)
    assert calls == ["rank 0"]
    assert waits == [0.0]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_ranks_own_error_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr("pyhvd.elastic.loop.time.sleep", waits.append)

    @hvd.elastic.run
    def function(state: Any) -> None:
        hvd.allreduce(np.zeros(2 + hvd.rank()), name="shape")

    def body() -> None:
        with pytest.raises(hvd.MismatchError):
            function(make())

    Hosts().run([0, 0], body)
    assert waits == []


# -- samples -------------------------------------------------------------------------------------------


def test_every_sample_is_committed_once() -> None:
    """Twelve generations of random sizes are killed after a random step."""
    hosts, chance, length = Hosts(), random.Random(3), 150
    log = list[int]()

    @hvd.elastic.run
    def function(state: Any, stop: int) -> None:
        for step, taken in enumerate(_batches(state.sampler, 3)):
            if step == stop:
                return
            state.sampler.record_batch(step, len(taken))
            everyone = [index for part in hvd.allgather_object(taken) for index in part]
            state.taken.append(everyone)
            if step % 2:
                state.commit()
        state.commit()

    def body(stop: int) -> Any:
        state = ObjectState(sampler=ElasticSampler(length, seed=5), taken=[])
        function(state, stop)
        newest = vault().newest()
        return newest and newest.number

    for _ in range(12):
        places = sorted(chance.choices(range(3), k=chance.randint(1, 5)))
        hosts.run(places, body, chance.randint(0, 5))
    hosts.run([0, 1], body, 10**6)

    def read() -> None:
        state = ObjectState(sampler=ElasticSampler(length, seed=5), taken=[])
        hvd.elastic.run(lambda state: log.extend(itertools.chain.from_iterable(state.taken)))(state)
        assert list(state.sampler) == []

    hosts.run([0], read)
    counts = Counter(log)
    assert set(counts) == set(range(length))
    assert len(log) - length < 2


def _batches(sampler: ElasticSampler, size: int) -> Iterator[list[int]]:
    indices = list(sampler)
    return (indices[at : at + size] for at in range(0, len(indices), size))


def test_ranks_without_a_last_index_join() -> None:
    hosts, log = Hosts(), list[int]()

    @hvd.elastic.run
    def function(state: Any) -> Any:
        for taken in _batches(state.sampler, 1):
            hvd.allreduce(np.ones(1), name="step")
            state.sampler.record_batch(0, 1)
            log.extend(taken)
        hvd.join()
        state.commit()
        return state.sampler.state_dict()

    def body() -> Any:
        return function(ObjectState(sampler=ElasticSampler(5, pad=False)))

    assert hosts.run([0, 1, 1], body) == [{"epoch": 0, "processed_num": 5}] * 3
    assert sorted(log) == list(range(5))


def test_ranks_that_record_different_numbers_are_added_up() -> None:
    hosts = Hosts()

    @hvd.elastic.run
    def function(state: Any, count: int) -> Any:
        if count:
            state.sampler.record_batch(0, count)
            state.commit()
        return state.sampler.state_dict()

    def body(counts: tuple[int, ...]) -> Any:
        return function(ObjectState(sampler=ElasticSampler(100)), counts[hvd.rank()])

    assert hosts.run([0, 0, 1], body, (4, 3, 2)) == [{"epoch": 0, "processed_num": 9}] * 3
    assert hosts.run([0, 1], body, (0, 0)) == [{"epoch": 0, "processed_num": 9}] * 2


def test_the_session_of_a_thread_ends_with_it() -> None:
    assert current() is None
    Hosts().run([0], lambda: None)
    assert current() is None
    assert played.get() is None
