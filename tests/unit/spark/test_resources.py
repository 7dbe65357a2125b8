"""The devices of a rank: those that Spark assigned to its task."""

from __future__ import annotations

import json

import pytest

from pyhvd.errors import ConfigError
from pyhvd.spark.resources import RESOURCES, get_available_devices

_RANK = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_resources_of_a_task_go_to_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"gpu": ["2", "GPU-5b1"], "fpga": ["f1"]}
    variables = {RESOURCES: json.dumps(resources)}
    set_variables(monkeypatch, _RANK | variables)
    assert get_available_devices() == ["2", "GPU-5b1"]


def test_no_devices_where_spark_has_assigned_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, _RANK)
    assert get_available_devices() == []
    set_variables(monkeypatch, {RESOURCES: json.dumps({"fpga": ["f1"]})})
    assert get_available_devices() == []


@pytest.mark.parametrize("prefix", ["PYHVD", "HOROVOD"])
def test_local_rank_in_place_of_devices(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    name = f"{prefix}_SPARK_USE_LOCAL_RANK_GPU_INDEX"
    set_variables(monkeypatch, _RANK | {RESOURCES: json.dumps({"gpu": ["7"]})} | {name: "1"})
    assert get_available_devices() == ["1"]
    monkeypatch.setenv(name, "0")
    assert get_available_devices() == ["7"]
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ConfigError, match=rf"{name}='yes': expected 0 or 1"):
        get_available_devices()
