"""Test submissions from C by call ids: C code, built apart from pyhvd, on ranks that are threads."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api import c_api
from pyhvd.dtypes import Code
from pyhvd.testing import run_ranks
from tests.c_callers import (
    BY_PYTHON,
    INVALID,
    PENDING,
    STALE,
    SUBMITTED,
    WAITS,
    WARNINGS,
    Callers,
    compile_callers,
    compile_library,
    id_of,
    table,
)
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Callers:
    return compile_callers(tmp_path_factory.mktemp("callers"))


def _on(size: int, function: Any, hosts: list[int] | None = None) -> list[Any]:
    knobs = {"fast_lane": True, "dynamic_process_sets": True}
    return run_ranks(size, function, timeout=60, knobs=knobs, hosts=hosts)


@pytest.mark.parametrize("hosts", [None, [0, 1]], ids=["one host", "two hosts"])
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "callback"])
def test_a_c_thread_submits_a_thousand_times(callers: Callers, waits: bool, hosts: list[int] | None) -> None:
    def body() -> None:
        number = id_of("allreduce", np.ones(1, np.float32), "x", op=hvd.Sum)
        assert callers.repeat(number, 1000, waits) == 0
        assert hvd.allreduce(np.ones(1, np.float32), name="x", op=hvd.Sum) == hvd.size()

    _on(2, body, hosts)


def test_a_grouped_call_takes_its_tensors_in_the_order_of_python(callers: Callers) -> None:
    def body() -> None:
        rank, size = hvd.rank(), hvd.size()
        lengths = (5, 1, 300, 2)
        tensors = [np.full(n, rank, kind) for n, kind in zip(lengths, "fdfi", strict=True)]
        # The last tensor gets its cache slot first, so slots have another order.
        hvd.allreduce(tensors[3], name="g_4of4", op=hvd.Sum)
        number = id_of("grouped_allreduce", tensors, "g", op=hvd.Sum)
        for turn in range(20):
            sources = [np.full_like(each, rank + turn + k) for k, each in enumerate(tensors)]
            targets = [np.zeros_like(each) for each in tensors]
            assert callers.run(number, sources, targets, WAITS if turn % 2 else 0) == ""
            for k, target in enumerate(targets):
                assert target.tolist() == [sum(range(size)) + size * (turn + k)] * lengths[k]
        assert callers.run(number, sources, sources) == ""  # in place
        assert [each[0] for each in sources] == [each[0] for each in targets]

    _on(3, body)


def test_the_layouts_are_told(callers: Callers) -> None:
    def body() -> None:
        pair = [np.ones((3, 2), np.float32), np.ones((), np.int64)]
        number = id_of("grouped_allreduce", pair, "g", op=hvd.Sum)
        status, first = callers.describe(number, 0)
        assert (status, first.n, first.type, first.ndim, first.dims[:2]) == (0, 2, Code.FLOAT32, 2, [3, 2])
        assert (first.source_bytes, first.target_bytes, first.in_arena) == (24, 24, 0)
        assert callers.describe(number, 1)[1].source_bytes == 8
        assert callers.describe(number, 2)[0] == INVALID
        assert callers.begin(number, pair[:1], pair[:1])[0] == INVALID
        assert callers.c.submit_without_done(callers.api, ctypes.c_uint64(number)) == INVALID
        hvd.barrier()

    _on(2, body)


def test_other_verbs(callers: Callers) -> None:
    def body() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = np.arange(4.0) + rank
        number = id_of("broadcast", x, "b", root_rank=1)
        into = np.zeros(4)
        assert callers.run(number, [x], [into]) == ""
        assert into.tolist() == [1, 2, 3, 4]
        assert c_api.call_id("broadcast", x, "b", root_rank=0) is None
        number = id_of("allgather", x, "a")
        rows = np.zeros(4 * size)
        assert callers.describe(number, 0)[1].target_bytes == rows.nbytes
        assert callers.run(number, [x], [rows]) == ""
        assert rows.tolist() == [k + q for q in range(size) for k in range(4)]
        number = id_of("reducescatter", x, "r", op=hvd.Sum)
        part = np.zeros(4 // size)
        assert callers.run(number, [x], [part]) == ""
        assert part.tolist() == [size * k + 1 for k in range(4)][rank * 2 :][:2]
        number = id_of("alltoall", x, "t")
        assert callers.run(number, [x], [into]) == ""
        assert into.tolist() == [rank * 2 + k + q for q in range(2) for k in range(2)]

    _on(2, body)


def test_only_the_same_call_has_the_id() -> None:
    def body() -> None:
        x = np.ones(3, np.float32)
        assert c_api.call_id("allreduce", x, "x") is None
        number = id_of("allreduce", x, "x")
        assert c_api.call_id("allreduce", np.empty(3, np.float32), "x", op=hvd.Average) == number
        assert c_api.call_id("allreduce", x, "x", op=hvd.Sum) is None
        assert c_api.call_id("allreduce", x, "x", prescale_factor=2.0) is None
        assert c_api.call_id("allreduce", np.ones(4, np.float32), "x") is None
        assert c_api.call_id("allreduce", np.ones(3), "x") is None
        assert c_api.call_id("allreduce", np.ones(6, np.float32)[::2], "x") is None
        assert c_api.call_id("grouped_allreduce", [x], "x") is None
        assert c_api.call_id("allgather", x, "x") is None
        with pytest.raises(ValueError, match="no verb is named 'reduce'"):
            c_api.call_id("reduce", x, "x")
        hvd.barrier()

    _on(2, body)


def test_ranks_have_ids_of_their_own(callers: Callers) -> None:
    found = _on(2, lambda: id_of("allreduce", np.ones(1), "x"))
    assert len(set(found)) == 2
    assert [callers.wait(each) for each in found] == [STALE] * 2


def test_a_call_in_flight_is_not_submitted_again(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(1, np.float32), np.zeros(1, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        gate.wait()
        if hvd.rank():
            gate.wait()
        status, outcome = callers.begin(number, [x], [y])
        assert status == SUBMITTED
        if not hvd.rank():
            assert callers.begin(number, [x], [y])[0] == BY_PYTHON
            assert callers.wait(number, 1_000_000) == PENDING
            with pytest.raises(hvd.DuplicateNameError):
                hvd.allreduce_async(x, name="x", op=hvd.Sum)
            gate.wait()
        assert callers.end(outcome) == ""
        assert y == 2
        hvd.barrier()  # until then no rank shuts down
        assert callers.wait(number) == 0
        hvd.barrier()

    gate = threading.Barrier(2)
    _on(2, body)


def test_the_background_thread_ends_a_call_that_nobody_waits_for(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(1, np.float32), np.zeros(1, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        time.sleep(0.3)  # the background threads sleep
        for _ in range(3):
            status, outcome = callers.begin(number, [x], [y])
            assert status == SUBMITTED
            assert callers.end(outcome, helps=False) == ""
            assert y == hvd.size()

    _on(2, body)


def test_one_rank_submits_in_c_and_one_in_python(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        for turn in range(60):
            if (hvd.rank() + turn) % 2:
                assert callers.run(number, [x], [y]) == ""
            else:
                y = hvd.allreduce(x, name="x", op=hvd.Sum)
            assert y.tolist() == [2] * 3

    _on(2, body)


def test_python_and_c_submit_other_names_at_once(callers: Callers) -> None:
    def body() -> None:
        number = id_of("allreduce", np.ones(1, np.float32), "x", op=hvd.Sum)
        wrong: list[int] = []
        where = (hvd.rank(), hvd.size(), 1, None)
        thread = threading.Thread(
            target=lambda: wrong.append(callers.c.repeat(callers.api, ctypes.c_uint64(number), 500, *where))
        )
        thread.start()
        for turn in range(200):
            # Every tenth name is new, and goes by message.
            name = "y" if turn % 10 else f"new{turn}"
            assert hvd.allreduce(np.full(2, turn), name=name, op=hvd.Sum).tolist() == [turn * 2] * 2
        thread.join()
        assert wrong == [0]

    _on(2, body)


def test_a_taken_call_ends_by_message(callers: Callers) -> None:
    """Another rank's operation has changed: its request goes by message, and C gets Python's text."""

    def body() -> str:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        gate.wait()
        if hvd.rank():
            with pytest.raises(hvd.MismatchError) as caught:
                hvd.allreduce(np.ones(5, np.float32), name="x", op=hvd.Sum)
            text = str(caught.value)
        else:
            status, outcome = callers.begin(number, [x], [y])
            assert status == SUBMITTED
            text = callers.end(outcome)
        # The call is remembered no more, or again: in both cases Python submits it.
        assert hvd.allreduce(x, name="x", op=hvd.Sum).tolist() == [2] * 4
        return text

    gate = threading.Barrier(2)
    texts = _on(2, body)
    assert "x" in texts[0]
    assert "[4]" in texts[0] or "(4,)" in texts[0]
    assert texts[0] == texts[1]


def test_a_refusal_has_the_text_of_python(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        gate.wait()
        if hvd.rank() == 2:
            with pytest.raises(hvd.UnsupportedDtypeError):
                hvd.allreduce(np.array([object()]), name="x", op=hvd.Sum)
        elif hvd.rank() == 1:
            with pytest.raises(hvd.RankFailedError) as caught:
                hvd.allreduce(x, name="x", op=hvd.Sum)
            texts.append(str(caught.value))
        else:
            status, outcome = callers.begin(number, [x], [y])
            assert status == SUBMITTED
            texts.append(callers.end(outcome))
        hvd.barrier()

    gate = threading.Barrier(3)
    texts: list[str] = []
    _on(3, body)
    assert "rank 2" in texts[0]
    assert texts[0] == texts[1]
    error = c_api.exception(texts[0])
    assert type(error) is hvd.RankFailedError
    assert str(error) == texts[0]
    assert c_api.exception("another text") is None


@pytest.mark.parametrize("verb", ["allreduce", "broadcast", "allgather"])
def test_a_taken_call_may_succeed(callers: Callers, verb: str) -> None:
    """The other rank submits by message, as it has another call of this name in its program."""

    def body() -> None:
        x, y = np.arange(4.0), np.zeros(8 if verb == "allgather" else 4)
        terms = {"root_rank": 0} if verb == "broadcast" else {}
        number = id_of(verb, x, "x", **terms)
        gate.wait()
        if hvd.rank():
            # A name that is in flight by message turns the fast path's submissions of this name away.
            time.sleep(0.05)
            later = hvd.allreduce_async(np.ones(1), name="other")
            result = getattr(hvd, verb)(x, name="x", **terms)
            later.result()
        else:
            status, outcome = callers.begin(number, [x], [y])
            assert status == SUBMITTED
            hvd.allreduce(np.ones(1), name="other")
            assert callers.end(outcome) == ""
            result = y
        assert result.tolist() == [0, 1, 2, 3] * (2 if verb == "allgather" else 1)

    gate = threading.Barrier(2)
    _on(2, body)


def test_rows_that_change_are_an_error_in_c(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones((2, 3)), np.zeros((4, 3))
        number = id_of("allgather", x, "x")
        gate.wait()
        if hvd.rank():
            assert hvd.allgather(np.ones((5, 3)), name="x").shape == (7, 3)
        else:
            assert "memory for 96: another rank has changed" in callers.run(number, [x], [y])
        hvd.barrier()

    gate = threading.Barrier(2)
    _on(2, body)


def test_a_call_of_another_shape_retires_the_id(callers: Callers) -> None:
    def body() -> None:
        x = np.ones(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        other = id_of("allreduce", np.ones(5, np.float32), "x", op=hvd.Sum)
        assert other != number
        assert callers.begin(number, [x], [x])[0] == STALE
        assert callers.wait(number) == STALE
        assert callers.describe(number, 0)[0] == STALE
        y = np.zeros(5, np.float32)
        assert callers.run(other, [np.ones(5, np.float32)], [y]) == ""
        assert y.tolist() == [2] * 5
        hvd.barrier()

    _on(2, body)


def test_a_removed_process_set_retires_its_ids(callers: Callers) -> None:
    def body() -> None:
        x, y, number = np.ones(4, np.float32), np.zeros(4, np.float32), 0
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            hvd.allreduce(x, name="x", op=hvd.Sum, process_set=pair)
            hvd.barrier(pair)
            given = c_api.call_id("allreduce", x, "x", op=hvd.Sum, process_set=pair)
            assert given is not None
            number = given
            assert callers.run(number, [x], [y]) == ""
            assert y.tolist() == [2] * 4
        hvd.remove_process_set(pair)
        if hvd.rank() < 2:
            assert callers.begin(number, [x], [y])[0] == STALE

    _on(3, body)


def test_ids_end_with_the_generation(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        before = callers.generation()
        hvd.init()
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        hvd.shutdown()
        assert callers.generation() > before
        assert callers.begin(number, [x], [y])[0] == STALE
        hvd.init()
        assert callers.begin(number, [x], [y])[0] == STALE
        again = id_of("allreduce", x, "x", op=hvd.Sum)
        assert again != number
        assert callers.begin(number, [x], [y])[0] == STALE
        assert callers.run(again, [x], [y]) == ""
        hvd.shutdown()
        assert callers.wait(again) == STALE

    run_ranks(2, body, init=False, timeout=60, knobs={"fast_lane": True})


def test_no_number_crashes(callers: Callers) -> None:
    for number in (0, 1, 2**32, 2**32 + 5, 2**64 - 1, 0xFFFFFFFF, 7 << 32 | 65535, 1 << 40):
        assert callers.begin(number, [], [])[0] == STALE
        assert callers.wait(number, 1000) == STALE
        assert callers.describe(number, 0)[0] == STALE


def test_a_call_in_flight_at_the_end_gets_the_error(callers: Callers) -> None:
    """One rank leaves; the other one's call can never end, and its id is stale afterwards."""

    def body() -> None:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        if hvd.rank():
            gate.wait()
            return
        status, outcome = callers.begin(number, [x], [y])
        assert status == SUBMITTED
        handle = hvd.allreduce_async(x, name="y")
        gate.wait()
        text = callers.end(outcome)
        assert "shut down" in text
        assert text == str(handle.exception(10))
        wait_until(lambda: callers.begin(number, [x], [y])[0] == STALE)

    gate = threading.Barrier(2)
    _on(2, body)


def test_join_turns_submissions_away(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        if hvd.rank():
            wait_until(lambda: statuses and statuses[-1] == BY_PYTHON)
            # The other rank has joined, and contributes zeros.
            assert hvd.allreduce(x, name="x", op=hvd.Sum).tolist() == [1] * 4
            hvd.join()
            return
        thread = threading.Thread(target=submit, args=(number, x, y))
        joined.append(thread)
        thread.start()
        hvd.join()
        thread.join()

    def submit(number: int, x: Any, y: Any) -> None:
        time.sleep(0.1)
        statuses.append(callers.begin(number, [x], [y])[0])

    statuses: list[int] = []
    joined: list[threading.Thread] = []
    _on(2, body)
    assert statuses == [BY_PYTHON]


def test_a_forked_child_is_refused(callers: Callers) -> None:
    def body() -> None:
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        number = id_of("allreduce", x, "x", op=hvd.Sum)
        if hvd.rank() == 0:
            before = callers.generation()
            child = os.fork()
            if child == 0:
                fine = callers.begin(number, [x], [y])[0] == STALE and callers.wait(number) == STALE
                os._exit(0 if fine and callers.generation() > before else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert callers.run(number, [x], [y]) == ""

    _on(2, body)


def test_arrays_of_the_arena_are_told_apart(callers: Callers) -> None:
    def body() -> None:
        x = hvd.empty(64, np.float32)
        x[:] = 1
        for _ in range(3):
            hvd.allreduce_(x, name="x", op=hvd.Sum)
        hvd.barrier()
        number = c_api.call_id("allreduce", x, "x", op=hvd.Sum)
        assert number is not None
        arena = callers.describe(number, 0)[1].in_arena
        x[:] = 1
        assert callers.run(number, [x], [x]) == ""
        assert x.tolist() == [hvd.size()] * 64
        y = np.ones(64, np.float32)
        if arena:
            assert callers.begin(number, [y], [y])[0] == BY_PYTHON
        hvd.barrier()

    _on(2, body)


@pytest.mark.parametrize(
    "command",
    [["gcc", "-x", "c", "-std=c99"], ["g++", "-x", "c++", "-std=c++11"], ["g++", "-x", "c++", "-std=c++17"]],
    ids=" ".join,
)
def test_the_header_is_clean(command: list[str], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    (tmp_path / "use.c").write_text(
        "#include <pyhvd.h>\n#include <pyhvd.h>\n"
        "int use(const pyhvd_c_api *api) { return api->wait(1, 0) == PYHVD_CALL_ENDED; }\n"
    )
    flags = ["-fsyntax-only", *WARNINGS, "-Wstrict-prototypes" if "c" in command else "-Wold-style-cast"]
    subprocess.run([*command, *flags, f"-I{c_api.include_dir()}", str(tmp_path / "use.c")], check=True)


def test_the_types_are_those_of_python() -> None:
    text = (Path(c_api.include_dir()) / "pyhvd.h").read_text()
    found = {name: int(code) for name, code in re.findall(r"PYHVD_TYPE_(\w+) = (\d+)", text)}
    assert found == {code.name: code.value for code in Code}


def test_the_example_of_the_docs_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "internals.md").read_text()
    (block,) = re.findall(r"^```c\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "average.c").write_text(block)
    average = ctypes.CDLL(str(compile_library(tmp_path / "average.c", tmp_path, "c11"))).average

    def body() -> None:
        x = np.ones(100, np.float32)
        number = id_of("allreduce", x, "x")
        text = ctypes.create_string_buffer(100)
        for turn in range(100):
            x[:] = hvd.rank() + turn
            where = (ctypes.c_void_p(x.ctypes.data), text, ctypes.c_size_t(100))
            assert average(ctypes.c_void_p(table()), ctypes.c_uint64(number), *where) == 0
            assert x.tolist() == [turn + 0.5] * 100

    _on(2, body)
