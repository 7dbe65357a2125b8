"""What the hosts of a generation hold, and from where the next one goes on."""

from __future__ import annotations

import pytest

from pyhvd.job.driver.held_commits import HeldCommits, StateLostError
from pyhvd.job.messages import Beat, Hello, Restored, StoreOrder
from pyhvd.job.mpi.rank_env import read_generation
from pyhvd.job.spec import ElasticSpec

STORE = ElasticSpec(store=StoreOrder("file:///store", "job", b"key", 1, []))


def held(known: int, **commits: int) -> HeldCommits:
    made = HeldCommits(1, known, {"a", "b"})
    for host, commit in commits.items():
        made.hear(host, Hello("1", "3.11.0", 0.0, commit=commit), print)
    return made


def test_the_first_host_that_holds_the_newest_commit_is_the_source() -> None:
    variables = held(5, c=0, b=5, a=5).variables(ElasticSpec(), {"c": 0, "a": 1, "b": 3})
    generation = read_generation(variables)
    assert generation is not None
    assert (generation.number, generation.commit, generation.source) == (1, 5, 1)


def test_beats_tell_of_newer_commits_and_of_hosts_that_leave() -> None:
    made = held(5, a=5)
    made.hear("a", Beat(commit=4), print)
    assert made.commits == {"a": 5}
    made.hear("a", Beat(commit=6, leaves="preempted"), print)
    assert (made.commits, made.leaving) == ({"a": 6}, {"a": "preempted"})


def test_the_store_is_asked_once_when_every_holder_is_lost() -> None:
    made = held(5, c=0)
    assert made.asks_store(STORE)
    assert not made.asks_store(STORE)
    restoring = [made.is_restoring]
    said: list[str] = []
    made.hear("c", Restored(5, ""), said.append)
    restoring.append(made.is_restoring)
    assert restoring == [True, False]
    made.begin({"c"}, said.append)
    assert (made.began_from, made.holders) == (5, {"c"})
    assert said == ["pyhvd: commit 5 comes from the store"]


@pytest.mark.parametrize("commits", [{"a": 5, "c": 0}, {"b": 6, "c": 0}])
def test_the_store_is_not_asked_while_a_host_holds_the_commit(commits: dict[str, int]) -> None:
    assert not held(5, **commits).asks_store(STORE)


def test_an_older_commit_is_said_and_none_is_an_error() -> None:
    said: list[str] = []
    held(5, c=3).begin({"c"}, said.append)
    assert said == ["pyhvd: every host that held commit 5 is gone: ranks go on from commit 3"]
    with pytest.raises(StateLostError, match="no other host holds the state"):
        held(5, c=0).begin({"c"}, said.append)


def test_a_lost_host_holds_nothing_and_counts_only_while_ranks_run() -> None:
    made = held(5, a=5, b=5)
    made.lose("a", "is lost", counts=True)
    made.lose("b", "the job is over", counts=False)
    assert (made.holders, made.lost) == (set(), {"a": "is lost"})


def test_a_later_run_asks_the_store_and_does_not_begin_anew_if_that_cannot_be_read() -> None:
    answers = [Restored(7), Restored(0, "empty", empty=True), Restored(0, "away")]
    begun = []
    for answer in answers:
        made = HeldCommits(4, 0, set(), commits={"a": 0})
        assert made.asks_store(STORE)
        made.hear("a", answer, print)
        if answer.problem == "away":
            with pytest.raises(StateLostError, match="the job cannot be resumed: away"):
                made.begin({"a"}, print)
        else:
            made.begin({"a"}, print)
            begun.append(made.began_from)
    assert begun == [7, 0]
