"""Programs that import ``horovod``, through the distribution and through pyhvdrun."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

import pyhvd.spark
from pyhvd.testing import run_ranks
from tests.mpi.launch import ROOT, horovodrun

PROGRAMS = ROOT / "tests" / "torch" / "programs"
NAMES = (
    "mnist",
    "synthetic_benchmark",
    "accumulation",
    "mixed_precision",
    "sparse_embedding",
    "timeline",
    "variables",
)
_PATHS = [str(PROGRAMS / f"{name}.py") for name in ("all_of_them", *NAMES)]
COMPAT = str(ROOT / "compat" / "horovod")


@functools.cache
def _run_all(by: str) -> subprocess.CompletedProcess[str]:
    """Run all programs on 2 ranks, in one job."""
    if by == "as_horovod":
        return _run(sys.executable, "-m", "pyhvd.run", "-np", "2", "--as-horovod", *_PATHS)
    with tempfile.TemporaryDirectory() as folder:
        command = (*horovodrun(folder), "-np", "2", "python", "-u")
        return _run(*command, *_PATHS, PYTHONPATH=COMPAT)


def _run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env=os.environ | env
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", [pytest.param("as_horovod", marks=pytest.mark.any_mpi), "horovodrun"])
def test_a_program_for_horovod_runs_unchanged(by: str, name: str) -> None:
    done = _run_all(by)
    assert f"passed: {PROGRAMS / name}.py" in done.stdout, done.stdout + done.stderr
    if name == NAMES[-1]:
        assert done.returncode == 0, done.stderr
    if name == "mnist":
        assert "2 ranks, loss" in done.stdout
    if name == "synthetic_benchmark":
        assert "Total img/sec on 2 ranks" in done.stdout


def test_horovod_run_of_a_function() -> None:
    done = _run(sys.executable, str(PROGRAMS / "mnist.py"), "--num-proc", "2", PYTHONPATH=COMPAT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss" in done.stdout


def _of_launch(
    monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """Call horovod.run; return the arguments that pyhvd.launch gets, but for the function, and warnings."""
    monkeypatch.syspath_prepend(COMPAT)
    monkeypatch.setattr("pyhvd.launch", lambda fn, args, kwargs, **given: given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = importlib.import_module("horovod").run(print, *args, **kwargs)
    if not given["verbose"]:
        del given["verbose"]
    return given, [str(each.message) for each in caught]


def test_arguments_of_horovod_run_by_position_and_by_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = {"min_num_proc": 1, "max_num_proc": 4, "slots": 3, "reset_limit": 5, "cooldown_range": (6, 7)}
    places = {"hosts": "h", "start_timeout": 9, "ssh_port": 10, "ssh_identity_file": "key"}
    rest = {"output_filename": "o", "verbose": 1, "network_interfaces": "eth0,eth1", "executable": "python"}
    given, said = _of_launch(
        *(monkeypatch, (1,), {"a": 2}, 2, 1, 4, 3, 5, (6, 7), "h", None, 9, 10, "key", True, "o", True),
        *(None, True, "--x", "eth0,eth1", None, "python"),
    )
    assert given == {"num_proc": 2} | elastic | places | rest
    assert said == [
        f"horovod.run: {name} has no effect: it is not needed by pyhvd"
        for name in ("disable_cache", "mpi_args", "use_mpi")
    ]
    given, said = _of_launch(monkeypatch, np=2, min_np=1, max_np=4, network_interface="eth0")
    assert given == {"num_proc": 2, "min_num_proc": 1, "max_num_proc": 4, "network_interfaces": "eth0"}
    assert said == []


def test_horovod_run_without_restarts_needs_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    given, said = _of_launch(monkeypatch, num_proc=2, slots=2, nics=["lo"], prefix_output_with_timestamp=True)
    assert given == {"num_proc": 2, "network_interfaces": ["lo"], "prefix_output_with_timestamp": True}
    assert said == ["horovod.run: slots has no effect: it is for elastic jobs, with min_num_proc"]
    with pytest.raises(ValueError, match="use_gloo and use_mpi exclude each other"):
        _of_launch(monkeypatch, use_gloo=True, use_mpi=True)
    given, said = _of_launch(monkeypatch, min_np=1, reset_limit=0, elastic_timeout=5)
    assert (given, said) == ({"min_num_proc": 1, "elastic_timeout": 5, "reset_limit": 0}, [])


def test_two_owners_of_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("horovod/__init__.py,,\n")
    monkeypatch.setenv("PYTHONPATH", f"{COMPAT}:{tmp_path}")
    done = subprocess.run(
        [sys.executable, "-c", "import horovod"], capture_output=True, text=True, check=False
    )
    assert "both pyhvd-horovod and horovod 0.28.1 are installed" in done.stderr
    assert "pip uninstall -y horovod pyhvd-horovod" in done.stderr


# What Horovod's tests and examples, and libraries, import of each module.
IMPORTS = {
    "": "run __version__",
    "common.basics": "HorovodBasics",
    "common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "common.util": "_cache extension_available gloo_built mpi_built env nccl_built ddl_built ccl_built"
    " gpu_available check_extension get_ext_suffix split_list is_iterable num_rank_is_power_2",
    "data": "BaseDataLoader AsyncDataLoaderMixin",
    "data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
    "runner": "run",
    "runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts",
    "runner.launch": "run_commandline gloo_built mpi_built",
    "runner.util.threads": "in_thread",
    "spark.common.store": "Store",
    "torch": "_check_has_gpu mpi_ops optimizer functions compression sync_batch_norm SyncBatchNorm"
    " sparse_allreduce_async broadcast_object allgather_object HorovodInternalError Compression",
    "torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "torch.mpi_ops": "_basics synchronize poll is_homogeneous Sum Average Adasum rank size allreduce_async_"
    " HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather"
    " HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter",
    "torch.optimizer": "DistributedOptimizer _DistributedOptimizer",
    "torch.sync_batch_norm": "SyncBatchNorm",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_what_programs_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    module = importlib.import_module(f"horovod.{name}".rstrip("."))
    assert not [each for each in IMPORTS[name].split() if not hasattr(module, each)]


def test_what_programs_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    util = importlib.import_module("horovod.common.util")
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")
    assert util.mpi_built()
    with pytest.raises(ImportError):  # after which Ignite imports horovod.run
        importlib.import_module("horovod.run.runner")
    with pytest.raises(ValueError, match="init"):
        importlib.import_module("horovod.torch").rank()


def test_what_finds_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    discovery = importlib.import_module("horovod.runner.elastic.discovery")
    fixed = discovery.FixedHosts({"h1": 2})
    assert fixed.find_available_hosts_and_slots() == {"h1": 2}
    fixed.set({"h2": 1})
    assert fixed.find_available_hosts_and_slots() == {"h2": 1}
    script = discovery.HostDiscoveryScript("echo h1; echo h2:3", 4)
    assert script.find_available_hosts_and_slots() == {"h1": 4, "h2": 3}
    for command, text in [("echo no >&2; exit 3", "ended with code 3: no"), ("echo h:x", "bad line: line 1")]:
        with pytest.raises(RuntimeError, match=text):
            discovery.HostDiscoveryScript(command).find_available_hosts_and_slots()


_RULE = "average name op prescale_factor postscale_factor process_set"
_RULE_SYNC = "average name compression op prescale_factor postscale_factor process_set"
_SCATTER = "op process_set prescale_factor postscale_factor"
_RUN = (
    "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile"
    " start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi"
    " mpi_args network_interface network_interfaces executable np min_np max_np"
)
_BUILT = ("mpi", "gloo", "nccl", "ddl", "ccl")

# The names of Horovod's docs and of its modules that programs import: each with its parameters, in order.
# None: no function.
DOCUMENTED: dict[str, dict[str, str | None]] = {
    "": {"run": _RUN, "__version__": None},
    "runner": {"run": _RUN},
    "torch": {
        "init": "comm process_sets",
        **dict.fromkeys(("shutdown", "is_initialized", "stop_timeline", "rank", "size"), ""),
        "start_timeline": "file_path mark_cycles",
        **dict.fromkeys(("local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"), ""),
        **dict.fromkeys(("mpi_threads_supported", "mpi_enabled", "gloo_enabled"), ""),
        **dict.fromkeys((f"{name}_built" for name in (*_BUILT, "cuda", "rocm")), ""),
        "allreduce": f"tensor {_RULE_SYNC}",
        **dict.fromkeys(("allreduce_async", "allreduce_", "allreduce_async_"), f"tensor {_RULE}"),
        "grouped_allreduce": f"tensors {_RULE_SYNC}",
        **dict.fromkeys(
            ("grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"), f"tensors {_RULE}"
        ),
        "sparse_allreduce_async": "tensor name op process_set",
        **dict.fromkeys(("allgather", "allgather_async"), "tensor name process_set"),
        **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), "tensors name process_set"),
        **dict.fromkeys(
            ("broadcast", "broadcast_async", "broadcast_", "broadcast_async_"),
            "tensor root_rank name process_set",
        ),
        **dict.fromkeys(("alltoall", "alltoall_async"), "tensor splits name process_set"),
        "reducescatter": f"tensor name compression {_SCATTER}",
        "reducescatter_async": f"tensor name {_SCATTER}",
        "grouped_reducescatter": f"tensors name compression {_SCATTER}",
        "grouped_reducescatter_async": f"tensors name {_SCATTER}",
        "join": "device",
        "barrier": "process_set",
        **dict.fromkeys(("poll", "synchronize"), "handle"),
        "broadcast_object": "obj root_rank name process_set",
        "allgather_object": "obj name",
        "broadcast_parameters": "params root_rank",
        "broadcast_optimizer_state": "optimizer root_rank model",
        "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op"
        " gradient_predivide_factor num_groups groups sparse_as_dense process_set",
        "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
        "ProcessSet": "ranks_or_comm",
        **dict.fromkeys(("ProcessSet.included", "ProcessSet.size", "ProcessSet.rank"), ""),
        **dict.fromkeys(f"global_process_set.{name}" for name in ("process_set_id", "ranks", "mpi_comm")),
        **dict.fromkeys(("add_process_set", "remove_process_set"), "process_set"),
        **dict.fromkeys(("Average", "Sum", "Adasum", "Min", "Max", "Product", "HorovodInternalError")),
        **dict.fromkeys(("Compression.none", "Compression.fp16", "elastic.run", "elastic.TorchState")),
    },
    "torch.optimizer": {
        "_DistributedOptimizer.set_backward_passes_per_step": "passes",
        "_DistributedOptimizer.step": "closure",
        **dict.fromkeys(
            (f"_DistributedOptimizer.{name}" for name in ("synchronize", "skip_synchronize")), ""
        ),
        "_DistributedOptimizer.load_state_dict": "state_dict",
    },
    "torch.compression": {"Compressor.compress": "tensor", "Compressor.decompress": "tensor ctx"},
    "torch.elastic": {
        "run": "func",
        "run_fn": "func reset",
        "TorchState": "model optimizer",
        "ElasticSampler": "dataset shuffle seed",
    },
    "torch.elastic.state": {"TorchState": "model optimizer"},
    "torch.elastic.sampler": {
        "ElasticSampler": "dataset shuffle seed",
        "ElasticSampler.set_epoch": "epoch",
        "ElasticSampler.record_batch": "batch_idx batch_size",
        "ElasticSampler.load_state_dict": "state_dict",
        **dict.fromkeys(("ElasticSampler.state_dict", "ElasticSampler.reset"), ""),
    },
    "common.elastic": {
        "run_fn": "func reset",
        "State": "bcast_object get_rank",
        "ObjectState": "bcast_object get_rank",
        "State.register_reset_callbacks": "callbacks",
        **dict.fromkeys(
            (f"State.{name}" for name in ("on_reset", "reset", "save", "restore", "sync", "commit")), ""
        ),
        "State.check_host_updates": "",
    },
    "common.exceptions": {
        "HorovodInternalError": None,
        "HostsUpdatedInterrupt": "skip_sync",
        "HorovodVersionMismatchError": "name version installed_version",
    },
    "common.process_sets": {
        "ProcessSet": "ranks_or_comm",
        **dict.fromkeys(("add_process_set", "remove_process_set"), "process_set"),
    },
    "common.util": {
        **dict.fromkeys((f"{name}_built" for name in _BUILT), "verbose"),
        **dict.fromkeys(("extension_available", "gpu_available"), "ext_base_name verbose"),
        "check_extension": "ext_name ext_env_var pkg_path",
        "num_rank_is_power_2": "num_rank",
    },
    "data": {
        "AsyncDataLoaderMixin": "async_loader_queue_size",
        "AsyncDataLoaderMixin.close_async_loader": "",
    },
    "runner.elastic.discovery": {
        "HostDiscovery.find_available_hosts_and_slots": "",
        "HostDiscoveryScript": "discovery_script slots",
        "FixedHosts": "available_hosts_and_slots",
        "FixedHosts.set": "available_hosts_and_slots",
    },
    "runner.util.threads": {"in_thread": "target args name daemon silent"},
    "spark": {
        "run": "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr"
        " verbose nics prefix_output_with_timestamp executable",
        "run_elastic": "fn args kwargs num_proc min_num_proc max_num_proc start_timeout elastic_timeout"
        " reset_limit env stdout stderr verbose nics prefix_output_with_timestamp min_np max_np",
    },
    "spark.task": {"get_available_devices": ""},
    "spark.common.store": {
        **dict.fromkeys(("Store.create", "LocalStore", "FilesystemStore", "DBFSLocalStore"), "prefix_path"),
        "HDFSStore": "prefix_path host port user kerb_ticket driver extra_conf temp_dir",
        **dict.fromkeys((f"Store.get_{kind}_data_path" for kind in ("train", "val", "test")), "idx"),
        **dict.fromkeys(("Store.is_parquet_dataset", "Store.get_parquet_dataset"), "path"),
        **dict.fromkeys(("Store.exists", "Store.read"), "path"),
        "Store.write_text": "path text",
        **dict.fromkeys((f"Store.get_{kind}_path" for kind in ("run", "checkpoint", "logs")), "run_id"),
        "Store.get_checkpoints": "run_id suffix",
        **dict.fromkeys((f"Store.{name}" for name in ("get_runs_path", "saving_runs")), ""),
        **dict.fromkeys((f"Store.get_{name}" for name in ("checkpoint_filename", "logs_subdir")), ""),
    },
}


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns a module of horovod."""
    monkeypatch.syspath_prepend(COMPAT)
    return lambda name: importlib.import_module(f"horovod.{name}".rstrip("."))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_names_have_horovods_parameters(name: str, horovod: Any) -> None:
    """Parameters are Horovod's by position and by keyword; others may follow, with a default."""
    module, wrong = horovod(name), list[str]()
    for path, names in DOCUMENTED[name].items():
        try:
            found = operator.attrgetter(path)(module)
        except AttributeError as exc:
            wrong.append(f"{path}: {exc}")
            continue
        if names is not None and (text := _differs(found, names.split(), path)):
            wrong.append(f"{path}: {text}")
    assert not wrong


def _differs(found: Any, names: list[str], path: str) -> str:
    parameters = list(inspect.signature(found).parameters.values())
    if "." in path and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    both = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if [each.name for each in both[: len(names)]] != names:
        return f"has the parameters {[each.name for each in both]}"
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    more = [each for each in parameters if each.name not in names and each.kind not in kinds]
    needed = [each.name for each in more if each.default is each.empty]
    return f"also needs {needed}" if needed else ""


# What pyhvd has not, and a word of what its error recommends.
ABSENT = {
    "mxnet": "grouped_allreduce",
    "ray.elastic_v2": r"pyhvd\.ray\.RayExecutor\(min_workers=\)",
    **dict.fromkeys(
        (f"spark.{name}" for name in ("keras", "lightning", "torch")), r"pyhvd\.spark\.Estimator"
    ),
    **dict.fromkeys(("spark.torch.estimator", "spark.common.estimator"), r"pyhvd\.spark\.Estimator"),
    "spark.common.backend": r"pyhvd\.spark\.Estimator\(num_proc=\)",
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_pyhvd_has_not_says_what_to_do(name: str, horovod: Any) -> None:
    with pytest.raises(ImportError, match=rf"pyhvd.* has no horovod\..*{ABSENT[name]}"):
        horovod(name)


@pytest.mark.parametrize("name", ["ray", "ray.runner"])
def test_ray_has_the_executor(name: str, horovod: Any) -> None:
    assert horovod(name).RayExecutor.__module__ == "pyhvd.ray.executor"


def test_ray_has_elastic_ranks(horovod: Any) -> None:
    executor = horovod("ray.elastic").ElasticRayExecutor
    assert executor is horovod("ray").ElasticRayExecutor
    assert executor.__module__ == "pyhvd.ray.elastic_executor"
    assert not hasattr(horovod("ray.elastic"), "TestDiscovery")


@pytest.mark.parametrize(
    "name",
    [
        *("StateHandler", "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler"),
        *("get_handler_registry", "set_handler_registry"),
    ],
)
def test_handlers_of_states_say_what_to_do(name: str, horovod: Any) -> None:
    state = horovod("torch.elastic.state")
    with pytest.raises(ImportError, match=rf"has no {name}: .* state_dict\(\) and load_state_dict\(\)"):
        exec(f"from horovod.torch.elastic.state import {name}")
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = state.other


def test_builds_are_asked_about_with_verbose(horovod: Any) -> None:
    util, hvd = horovod("common.util"), horovod("torch")
    for name in _BUILT:
        asked = getattr(util, f"{name}_built")
        assert asked(verbose=True) == asked(True) == asked() == getattr(hvd, f"{name}_built")()


def test_run_fn_is_run(horovod: Any) -> None:
    """Its second argument makes ranks anew in Horovod; here they are new processes."""
    elastic, hvd = horovod("torch.elastic"), horovod("torch")

    def train(state: Any, more: int) -> int:
        return int(state.batch) + more

    def body() -> int:
        state = elastic.TorchState(batch=hvd.rank())
        return int(elastic.run_fn(train, pytest.fail)(state, 2))

    assert run_ranks(2, body) == [2, 2]


def test_stores_are_pyhvds(horovod: Any, tmp_path: Path) -> None:
    store = horovod("spark.common.store")
    for make in (store.Store.create, store.LocalStore, store.FilesystemStore, store.DBFSLocalStore):
        made = make(prefix_path=str(tmp_path))
        assert isinstance(made, pyhvd.spark.Store)
        assert (made.path, made.prefix_path) == (str(tmp_path),) * 2
        assert (made.saving_runs(), made.get_checkpoint_filename(), made.get_logs_subdir()) == (
            True,
            "checkpoint",
            "logs",
        )
        assert made.get_logs_path("r").endswith(f"/{made.get_logs_subdir()}")
        for given in ({"train_path": "/x"}, {"save_runs": False}):
            with pytest.raises(TypeError, match="has all its folders below prefix_path: make another store"):
                make(str(tmp_path), **given)
        with pytest.raises(TypeError, match="make another store"):
            make(str(tmp_path), "/train")
        with pytest.raises(
            AttributeError, match="has no attribute 'to_remote': a store can be pickled, so ranks use it"
        ):
            made.to_remote("r", 0)
    hdfs = store.HDFSStore("/user/x", "name", 8020, user="me", temp_dir="/tmp/x")
    assert (hdfs.path, hdfs.storage_options) == (
        "hdfs:///user/x",
        {"host": "name", "port": 8020, "user": "me"},
    )
    assert store.HDFSStore("hdfs://name:8020/x").path == "hdfs://name:8020/x"
    assert not store.HDFSStore("hdfs://name:8020/x").storage_options
    same = store.HDFSStore.create("/x", storage_options={"user": "me"})
    assert (same.path, same.storage_options) == ("hdfs:///x", {"user": "me"})


_CHILDREN = """
    import multiprocessing

    def work(kind):
        import horovod.common.util
        return kind + " child: " + horovod.__name__

    if __name__ == "__main__":
        for kind in ("spawn", "forkserver"):
            with multiprocessing.get_context(kind).Pool(1) as pool:
                print(pool.apply(work, (kind,)))
"""


def test_children_of_a_rank_find_horovod_too(tmp_path: Path) -> None:
    program = tmp_path / "with_children.py"
    program.write_text(textwrap.dedent(_CHILDREN))
    done = _run(sys.executable, "-m", "pyhvd.run", "-np", "2", "--as-horovod", str(program))
    assert done.returncode == 0, done.stderr
    for kind in ("spawn", "forkserver"):
        assert done.stdout.count(f"{kind} child: horovod") == 2


@pytest.mark.any_mpi
def test_texts_of_horovodrun_name_it(tmp_path: Path) -> None:
    shown = _run(*horovodrun(tmp_path), "--help")
    usage = "usage: horovodrun (-np N | -H HOSTS) [options] command [argument ...]"
    assert shown.stdout.startswith(usage)
    assert "horovodrun -np 4 python train.py" in shown.stdout
    assert "pyhvdrun" not in shown.stdout
    code = "import sys, horovod.runner.launch as launch; sys.exit(launch.run_commandline())"
    for command in (horovodrun(tmp_path), (sys.executable, "-c", code)):
        wrong = _run(*command, "-np", "2", "--nonsense", "python", "train.py", PYTHONPATH=COMPAT)
        assert (wrong.returncode, wrong.stderr) == (
            2,
            f"{usage}\nhorovodrun: error: unrecognized arguments: --nonsense\n",
        )
    missing = _run(*horovodrun(tmp_path), "-np", "2")
    assert missing.stderr.endswith("horovodrun: error: no command: give one, such as python train.py\n")


def test_horovodrun_runs_other_commands(tmp_path: Path) -> None:
    done = _run(*horovodrun(tmp_path), "-np", "2", "sh", "-c", "echo its word is $0; exit 3", "this")
    assert done.returncode == 3, done.stderr
    assert "its word is this" in done.stdout
    assert "exited with code 3" in done.stderr
