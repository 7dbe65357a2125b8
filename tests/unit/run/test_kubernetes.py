"""The manifests of docs/kubernetes.md: commands, volumes, times, and the steps of the image."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from pyhvd.job.machines import membership
from pyhvd.run import cli
from tests.manifests import FOLDER, NAMES, commands_of_launchers, container, objects, pods, steps_of_image

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_names_each_manifest() -> None:
    named = re.findall(r"^\| \[`(\S+\.yaml)`\]", (ROOT / "docs" / "kubernetes.md").read_text(), re.M)
    assert sorted(named) == NAMES
    assert len(NAMES) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_starts_one_job_with_known_flags(name: str) -> None:
    (command,) = commands_of_launchers(name)
    program, *words = shlex.split(command)
    if program == "pyhvdrun":
        assert program in PROJECT["scripts"]
        assert cli.parse(words, under_mpiexec=False)
    assert words[-1] == "train.py"


@pytest.mark.parametrize("name", NAMES)
def test_pods_with_ranks_have_shared_memory_and_room_for_it(name: str) -> None:
    for pod, spec in pods(name).items():
        if pod == "Launcher":
            continue
        mounts = {each["mountPath"]: each["name"] for each in container(name, pod)["volumeMounts"]}
        (memory,) = (each for each in spec["volumes"] if each["name"] == mounts["/dev/shm"])
        assert memory["emptyDir"]["medium"] == "Memory"
        sizes = memory["emptyDir"]["sizeLimit"], container(name, pod)["resources"]["limits"]["memory"]
        assert [int(size.removesuffix("Gi")) for size in sizes] == [2, 32]


@pytest.mark.parametrize("name", NAMES)
def test_every_mount_has_its_volume(name: str) -> None:
    for pod, spec in pods(name).items():
        mounted = {each["name"] for each in container(name, pod).get("volumeMounts", ())}
        assert mounted == {each["name"] for each in spec.get("volumes", ())}


@pytest.mark.parametrize("name", ["job.yaml", "job-torchrun.yaml"])
def test_the_service_gives_the_pods_their_names(name: str) -> None:
    service, job = objects(name)
    spec = job["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    hosts = {f"{job['metadata']['name']}-{pod}.{service['metadata']['name']}" for pod in range(2)}
    assert set(re.findall(r"train-\d\.\w+", commands_of_launchers(name)[0])) <= hosts


def test_pods_have_time_to_leave() -> None:
    specs = pods("mpijob-elastic.yaml")
    hook = container("mpijob-elastic.yaml", "Worker")["lifecycle"]["preStop"]["exec"]["command"]
    waits = int(hook[-1].rpartition(" ")[2])
    assert membership._LEAVE_S < waits < specs["Worker"]["terminationGracePeriodSeconds"]
    assert specs["Launcher"]["terminationGracePeriodSeconds"] > 2 * membership._LEAVE_S


def test_the_image_installs_what_is_there() -> None:
    steps = steps_of_image()
    (installed,) = (rest for name, rest in steps if name == "RUN" and rest.startswith("pip install "))
    (extras,) = re.findall(r'"pyhvd\[([\w,]+)\]"', installed)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (copied,) = (rest.split()[:-1] for name, rest in steps if name == "COPY")
    assert copied == ["train.py", "*.whl"]  # the user's, and those of make image
    recipe = (ROOT / "Makefile").read_text()
    assert "build/image/train.py" in recipe
    assert "examples/kubernetes/Dockerfile" in recipe
    image, works = dict(steps)["FROM"], dict(steps)["WORKDIR"]
    assert image == "python:${PYTHON}-slim"
    assert {container(name, pod).get("workingDir", works) for name in NAMES for pod in pods(name)} == {works}


@pytest.mark.parametrize(
    ("docker", "said"), [("", "which is not on PATH"), ("exit 1", "daemon, which does not answer")]
)
def test_make_image_says_that_docker_is_missing(docker: str, said: str, tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    if docker:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    command, env = [make, "-C", str(ROOT), "image"], {"PATH": str(tmp_path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr, ended.stderr


def test_the_folder_has_nothing_else() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"Dockerfile", *NAMES}
