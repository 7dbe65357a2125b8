"""Check examples/kubernetes/*.yaml against the schemas of Kubernetes; no network, no cluster.

The package kubernetes-validate has the schemas. An MPIJob's own fields are those of its version v2beta1; the
pods in it are checked as templates of Kubernetes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
VERSION = "1.33"

_COUNT = {"type": "integer", "minimum": 0}
_REPLICA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "replicas": _COUNT,
        "restartPolicy": {"enum": ["Never", "OnFailure", "Always", "ExitCode"]},
        "template": {"type": "object"},
    },
}
MPIJOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["mpiReplicaSpecs"],
            "properties": {
                "slotsPerWorker": _COUNT,
                "runLauncherAsWorker": {"type": "boolean"},
                "sshAuthMountPath": {"type": "string"},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "activeDeadlineSeconds": _COUNT,
                        "backoffLimit": _COUNT,
                        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                        "managedBy": {"type": "string"},
                        "schedulingPolicy": {"type": "object"},
                        "suspend": {"type": "boolean"},
                        "ttlSecondsAfterFinished": _COUNT,
                    },
                },
                "mpiReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Launcher", "Worker"],
                    "properties": {"Launcher": _REPLICA, "Worker": _REPLICA},
                },
            },
        },
    },
}


def check(manifest: dict[str, Any]) -> None:
    """Check one object.

    Raises
    ------
    jsonschema.ValidationError
        It does not fit its schema.
    """
    if manifest.get("kind") != "MPIJob":
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, MPIJOB)
    for kind, replica in manifest["spec"]["mpiReplicaSpecs"].items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": kind.lower()}}
        kubernetes_validate.validate(pod | {"template": replica["template"]}, VERSION, strict=True)


def main() -> int:
    """Check all manifests; print each fault, and return 1 if there is one."""
    faults = 0
    for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            try:
                check(manifest)
            except jsonschema.ValidationError as exc:
                place = ".".join(map(str, exc.path))
                print(f"{path.relative_to(ROOT)}: {manifest.get('kind')}: {place}: {exc.message}")
                faults += 1
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
