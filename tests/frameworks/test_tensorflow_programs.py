"""Programs with pyhvd.tensorflow: that of its page, elastic states, lost ranks, the end of a program."""
# ruff: noqa: E402

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: run `make test-frameworks`")

import pyhvd.tensorflow as hvd
from tests.frameworks.doors import KNOBS, NATIVE, on_doors
from tests.frameworks.forks import fork_and_go_on
from tests.mpi.test_docs_code import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = [
    block.code for block in BLOCKS if block.path.name == "tensorflow.md" and block.tags[:1] == ("python",)
]

# Rank 1 never makes the call, and both ranks end.
UNDER_WAY = """
import threading
import time

import tensorflow as tf

import pyhvd.tensorflow as hvd

hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, name="never"))
if hvd.rank() == 0:
    threading.Thread(target=step, args=(tf.ones(3),), daemon=True).start()
    time.sleep(2)
hvd.barrier()
"""


def _run(code: str, tmp_path: Path, door: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "pyhvd.run", "-n", "2", str(program)]
    env = {**os.environ, "PYHVD_GRAPH_OPS": KNOBS[door], "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("door", KNOBS)
@pytest.mark.parametrize("code", [*PAGE, UNDER_WAY], ids=["page", "step under way"])
def test_programs(code: str, door: str, tmp_path: Path) -> None:
    done = _run(code, tmp_path, door)
    assert done.returncode == 0, done.stderr


@on_doors()
def test_errors_come_out_of_elastic_run() -> None:
    hvd.init()
    step = tf.function(lambda x: hvd.allreduce(x, name="lost"))

    @hvd.elastic.run
    def train(_: Any) -> None:
        step(tf.ones(3))
        if hvd.rank() == 1:
            hvd.shutdown()
        else:
            for _ in range(3):
                step(tf.ones(3))

    state = hvd.elastic.ObjectState(epoch=0)
    if hvd.rank() == 1:
        train(state)
    else:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(state)
        assert isinstance(caught.value.__cause__, tf.errors.OpError)
        hvd.shutdown()


@on_doors()
def test_a_process_may_fork_after_collectives() -> None:
    hvd.init()
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="forking"))

    def check() -> None:
        assert step(tf.ones(3)).numpy().tolist() == [2.0, 2.0, 2.0]

    fork_and_go_on(check)


@on_doors()
def test_shutdown_waits_for_a_collective_that_is_under_way() -> None:
    hvd.init()
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="last"))
    step(tf.ones(3))
    hvd.barrier()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(step(tf.ones(3)).numpy()))
    if hvd.rank() == 1:
        time.sleep(1.0)
    thread.start()
    time.sleep(0.3)
    hvd.shutdown()
    thread.join()
    assert results[0].tolist() == [2.0, 2.0, 2.0]


@on_doors(NATIVE)
def test_states() -> None:
    import keras

    hvd.init()
    rank = float(hvd.rank())
    variables = [tf.Variable([rank, rank]), tf.Variable(rank)]
    state = hvd.elastic.TensorFlowState(variables, epoch=3 + hvd.rank())
    state.sync()
    assert [each.numpy().sum() for each in variables] == [0, 0]
    assert state.epoch == 3
    variables[0].assign([7.0, 7.0])
    state.commit()
    variables[0].assign([8.0, 8.0])
    state.restore()
    assert variables[0].numpy().tolist() == [7, 7]
    assert state.variables[0] is variables[0]
    with pytest.raises(RuntimeError, match="TensorFlow 1"):
        hvd.elastic.TensorFlowState(variables, session=object())

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), loss="mse", jit_compile=False)
    whole = hvd.elastic.TensorFlowKerasState(model, batch=0)
    whole.sync()
    everyone = hvd.allgather_object([each.copy() for each in model.get_weights()])
    for mine, other in zip(*everyone, strict=True):
        np.testing.assert_array_equal(mine, other)
    before = [np.asarray(each) for each in (*model.weights, *model.optimizer.variables)]
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert model.optimizer.iterations.numpy() == 1
    whole.restore()
    after = [np.asarray(each) for each in (*model.weights, *model.optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


IMPORTS = {
    "": "allreduce DistributedGradientTape DistributedOptimizer broadcast_variables Compression elastic"
    " mpi_ops functions size rank init Average Sum Adasum",
    "compression": "Compression Compressor NoneCompressor FP16Compressor",
    "elastic": "run TensorFlowState TensorFlowKerasState",
    "functions": "broadcast_variables broadcast_object broadcast_object_fn allgather_object"
    " broadcast_global_variables",
    "mpi_ops": "allreduce allgather broadcast alltoall size local_size rank local_rank rank_op size_op",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_the_name_horovod(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "compat" / "horovod"))
    module = importlib.import_module(f"horovod.tensorflow.{name}".rstrip("."))
    assert not [each for each in IMPORTS[name].split() if not hasattr(module, each)]
