"""Run tests of torch's suite for backends as one rank of a world, in order, in one default group.

:mod:`tests.torch.distributed.judge` starts it: ``python -m tests.torch.distributed.judge_ranks FOLDER
BACKEND``. The folder is the suite's ``TEMP_DIR``. Its file ``names.json`` has the tests, and the outcomes
after which the world ends, since groups may be in disorder. After each test every rank writes its outcome
into ``results``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from tests.mpi.launch import RANK_VARIABLES

_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
# More than a test calls the suite's barrier of files.
_BARRIERS = 1000
_SECONDS = 60.0
# These tests do not skip themselves where they cannot run.
_LACKS = re.compile(
    r"rank_to_GPU\[rank\]\[0\]|name 'torchvision'|have NCCL built in|Valid ranks are 0 to|NVIDIA driver"
)


def _prepare(folder: Path, rank: int, size: int) -> Any:
    """Set what the suite reads, and import it as gloo's: it skips tests of backends that it does not know."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # the group comes by a file; one test prints this
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder}/init_dir/shared",
        BACKEND="gloo",
    )
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _judged(suite: Any, backend: str, rank: int, size: int) -> type[Any]:
    """Return the class of the tests, for a backend."""
    from torch.testing._internal.common_utils import TestCase

    base = suite.DistributedTest._DistTestBase
    suite.BACKEND = backend
    # This name alone lets tests with a group of the ranks 1 and 2 run on fewer than 8 ranks.
    os.environ["BACKEND"] = "mpi" if size > 2 else backend

    class Judged(TestCase, base):  # type: ignore[misc, valid-type]
        world_size = str(size)
        init_method = suite.INIT_METHOD

        def setUp(self) -> None:
            super().setUp()
            self.rank = rank

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            suite.BACKEND = "gloo"  # makes the model for no other name
            try:
                super()._test_accumulate_gradients_no_sync(*args, **kwargs)
            finally:
                suite.BACKEND = backend

    return Judged


def _let_through(dist: Any) -> None:
    """Let a monitored barrier reach the backend: up to torch 2.13 that is refused for all but gloo."""
    original = dist.monitored_barrier

    def monitored_barrier(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(dist.distributed_c10d, "get_backend", return_value="gloo"):
            original(*args, **kwargs)

    dist.monitored_barrier = monitored_barrier


def _run(judged: type[Any], name: str, skips: dict[int, str]) -> tuple[str, str]:
    """Run a test; return its outcome, and why."""
    test = judged(name)
    try:
        test.setUp()
        try:
            getattr(test, name)()
        finally:
            test.tearDown()
            test.doCleanups()
    except unittest.SkipTest as exc:
        return "skipped", str(exc)
    except SystemExit as exc:
        if exc.code in skips:
            return "skipped", skips[exc.code]
        return "failed", traceback.format_exc()
    except BaseException:
        text = traceback.format_exc()
        return (
            ("skipped", "needs a GPU, more ranks or torchvision") if _LACKS.search(text) else ("failed", text)
        )
    return "passed", ""


def _write(folder: Path, name: str, outcome: tuple[str, str]) -> None:
    part = folder / "results" / f"{name}.part"
    part.write_text(json.dumps(outcome))
    part.rename(part.with_suffix(""))


def main() -> None:
    """Run the tests."""
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    rank, size = (
        next(int(os.environ[name]) for name in names if name in os.environ)
        for names in (RANK_VARIABLES, _SIZE_VARIABLES)
    )
    suite = _prepare(folder, rank, size)
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if backend == "pyhvd":
        import pyhvd.torch.distributed  # noqa: F401 - makes the name known

        _let_through(dist)

    judged = _judged(suite, backend, rank, size)
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    dist.init_process_group(
        backend, suite.INIT_METHOD, timedelta(seconds=_SECONDS), world_size=size, rank=rank
    )
    _write(folder, f"start.{rank}", ("passed", ""))
    last, names = json.loads((folder / "names.json").read_text())
    for index, name in enumerate(names):
        suite.Barrier.barrier_id = index * _BARRIERS
        outcome = _run(judged, name, skips)
        _write(folder, f"{index}.{rank}", outcome)
        suite.Barrier.barrier_id = (index + 1) * _BARRIERS - 1
        suite.Barrier.sync(wait_for=size, timeout=10 * _SECONDS)
        others = [json.loads((folder / "results" / f"{index}.{other}").read_text()) for other in range(size)]
        if any(kind in last for kind, _ in others):
            os._exit(0)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
