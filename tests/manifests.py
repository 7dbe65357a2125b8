"""The manifests and the Dockerfile of examples/kubernetes, for tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "kubernetes"
NAMES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def objects(name: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Return the specs of a manifest's pods: of an MPIJob by replica type, of a Job by its name."""
    (job,) = (each for each in objects(name) if each["kind"] in ("Job", "MPIJob"))
    if job["kind"] == "Job":
        return {job["metadata"]["name"]: job["spec"]["template"]["spec"]}
    return {kind: each["template"]["spec"] for kind, each in job["spec"]["mpiReplicaSpecs"].items()}


def container(name: str, pod: str = "train") -> dict[str, Any]:
    """Return the only container of a pod."""
    (found,) = pods(name)[pod]["containers"]
    return dict(found)


def commands_of_launchers(name: str) -> list[str]:
    """Return the lines of a manifest that start ranks, each a command for a shell."""
    lines = []
    for pod in pods(name):
        words = container(name, pod)["command"]
        if words[:2] == ["bash", "-c"]:
            joined = words[2].replace("\\\n", "")
            lines += [line.strip() for line in joined.splitlines()]
        else:
            lines.append(" ".join(json.dumps(word) for word in words))
    starts = re.compile(r'^(?:exec )?"?(?:pyhvdrun|torchrun)\b')
    return [line.removeprefix("exec ") for line in lines if starts.match(line)]


def steps_of_image() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: each one's name and the rest, its lines joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.M).replace("\\\n", "")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]
