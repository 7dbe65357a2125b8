"""The parts of ``pyhvd.ray`` that need no Ray: arguments, workers, names."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import pyhvd.ray
from pyhvd.ray.discovery import node_names
from pyhvd.ray.settings import RaySettings, WorkerShape, count_gpus, warn_of_ssh


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "no number of ranks: give num_workers or num_hosts, or min_workers"),
        ({"num_workers": 2, "num_hosts": 2}, "both num_hosts and num_workers"),
        ({"num_workers": 0}, "num_workers=0: expected a whole number"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_hosts": 2, "num_workers_per_host": 1.5}, r"num_workers_per_host=1\.5"),
        ({"min_workers": 1, "num_workers": 2}, "both num_workers and min_workers"),
        ({"max_workers": 2}, "max_workers needs min_workers"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers=2: expected no fewer than min_workers, 3"),
        ({"min_workers": 1, "reset_limit": -1}, "reset_limit=-1"),
        ({"min_workers": 1, "elastic_timeout": 0}, "elastic_timeout=0"),
        ({"min_workers": 1, "cooldown_range": (9, 1)}, r"cooldown_range=\(9, 1\)"),
        ({"min_workers": 1, "override_discovery": False}, r"settings\.discovery=None"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pyhvd.ray.RayExecutor(**given)


def test_arguments_that_fit() -> None:
    assert pyhvd.ray.RayExecutor(num_workers=4).num_workers == 4
    assert pyhvd.ray.RayExecutor(num_hosts=2, num_workers_per_host=4).num_workers == 8
    elastic = pyhvd.ray.RayExecutor(min_workers=2, cooldown_range=[1, 5], reset_limit=0)
    assert elastic.num_workers == 2
    for method in (elastic.run_remote, elastic.execute_single):
        with pytest.raises(NotImplementedError, match="needs ranks that stay"):
            method(print)


def test_settings_of_the_elastic_executor() -> None:
    create = pyhvd.ray.ElasticRayExecutor.create_settings
    with pytest.warns(UserWarning, match="without effect: verbose"):
        settings = create(max_num_proc=3, min_np=2, cooldown_range=(1, 2), verbose=1, nics={"lo"})
    assert settings.elastic == {
        "min_workers": 2,
        "max_workers": 3,
        "cooldown_range": (1, 2),
        "reset_limit": None,
        "elastic_timeout": 600,
    }
    assert settings.nics == ["lo"]
    pyhvd.ray.ElasticRayExecutor(settings, env_vars={"A": "b"})
    with pytest.raises(ValueError, match="max_workers=1"):
        pyhvd.ray.ElasticRayExecutor(create(min_num_proc=2, max_num_proc=1))


def test_the_names_of_nodes() -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    nodes = [
        {"NodeID": f"{k}" * 9, "NodeManagerAddress": address, "NodeManagerHostname": f"n{k}"}
        for k, address in enumerate(addresses)
    ]
    assert list(node_names(nodes).values()) == ["10.0.0.1", "n1_11111111", "n2_22222222"]


def test_gpus_of_a_rank() -> None:
    assert count_gpus(None, use_gpu=False) == 0
    assert count_gpus(None, use_gpu=True) == 1
    assert count_gpus(0.5, use_gpu=True) == 0.5
    with pytest.raises(ValueError, match="set use_gpu=True"):
        count_gpus(1, use_gpu=False)
    with pytest.raises(ValueError, match="gpus_per_worker=0: expected a number above 0"):
        count_gpus(0, use_gpu=True)


def test_arguments_of_ssh_have_no_effect() -> None:
    warn_of_ssh(None, None)
    with pytest.warns(UserWarning, match="ssh_identity_file and ssh_str have no effect"):
        warn_of_ssh("id_ed25519", None)
    assert RaySettings().timeout_s == 30


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    executor = pyhvd.ray.RayExecutor(num_hosts=2, num_workers_per_host=3)
    assert executor.num_workers == 6
    with pytest.raises(pyhvd.ray.RayError, match=r'pip install "pyhvd\[ray\]"'):
        executor.start()
    with pytest.raises(pyhvd.ray.RayError, match=r"call start\(\) first"):
        executor.run(print)
    executor.shutdown()
    with pytest.raises(AttributeError, match="no attribute 'Rayexecutor'"):
        _ = pyhvd.ray.Rayexecutor


@pytest.mark.parametrize(
    ("shape", "bundle", "room"),
    [
        (WorkerShape(4, None, 1, 0), {"CPU": 2.0}, 2),
        (WorkerShape(4, None, 2, 0.5), {"CPU": 8.0, "GPU": 1.0}, 2),
        (WorkerShape(4, None, 0.1, 0), {"CPU": 0.3}, 3),
        (WorkerShape(4, None, 1, 1), {"CPU": 8.0}, 0),
    ],
)
def test_the_room_of_a_bundle(shape: WorkerShape, bundle: dict[str, float], room: int) -> None:
    assert shape.room(bundle) == room


def test_the_resources_of_ranks() -> None:
    shape = WorkerShape(3, 2, 2, 0.5)
    assert shape.size == 6
    assert shape.resources(3) == {"CPU": 6, "GPU": 1.5}
    assert WorkerShape(3, None, 1, 0).resources(1) == {"CPU": 1}


def test_a_timeout_is_one_for_python_too() -> None:
    error = pyhvd.ray.StartTimeoutError("late", [1])
    assert isinstance(error, TimeoutError)
    assert isinstance(error, pyhvd.ray.RayError)
    assert (str(error), error.missing) == ("late", [1])


def test_a_worker_holds_an_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("HOROVOD_HOSTNAME", "h1")
    worker = pyhvd.ray.BaseHorovodWorker(1, 4)
    worker.start_executable()
    assert worker.execute(lambda each: each.executable) is None
    worker.start_executable(dict, ([("a", 1)],), {"b": 2})
    assert worker.execute(lambda each: each.executable) == {"a": 1, "b": 2}
    monkeypatch.setenv("ADDED", "")
    worker.update_env_vars({"ADDED": "x"})
    assert worker.env_vars()["ADDED"] == "x"
    assert (worker.world_rank, worker.world_size) == (1, 4)
    assert (worker.hostname(), worker.get_gpu_ids()) == ("h1", ["2", "3"])


def test_horovods_names() -> None:
    from pyhvd.aliases.as_horovod import ray as horovod_ray
    from pyhvd.aliases.as_horovod.ray import ray_logger

    assert horovod_ray.BaseHorovodWorker is pyhvd.ray.BaseHorovodWorker
    assert horovod_ray.ray_logger is ray_logger
    ray_logger.log({"loss": 1})  # outside of ranks: no effect
    with pytest.raises(AttributeError, match="no attribute 'ElasticRay'"):
        _ = horovod_ray.ElasticRay
