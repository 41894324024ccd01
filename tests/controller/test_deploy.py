"""`deploy/` as data: its objects against Kubernetes' schemas, the kustomization, the Dockerfiles.

`test_kubernetes.py` applies the same objects to a real API server.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
OBJECTS = [item for name in KUSTOMIZATION["resources"] for item in yaml.safe_load_all((DEPLOY / name).read_text())]


def tool(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    return found or pytest.skip(f"no {name}")


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_objects_are_valid(item: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(item, schemas.latest_version(), strict=True)


def test_the_kustomization_is_complete() -> None:
    files = {path.name for path in DEPLOY.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    pods = [item["spec"]["template"]["spec"] for item in OBJECTS if item["kind"] == "StatefulSet"]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {image["name"] for image in KUSTOMIZATION["images"]}


def test_kubectl_builds_it() -> None:
    built = subprocess.run([tool("kubectl"), "kustomize", str(DEPLOY)], capture_output=True, text=True, check=True)
    kinds = sorted(item["kind"] for item in yaml.safe_load_all(built.stdout))
    assert kinds == sorted(item["kind"] for item in OBJECTS)


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.Dockerfile")), ids=lambda file: file.stem)
def test_dockerfiles_are_clean(file: Path) -> None:
    linted = subprocess.run([tool("hadolint"), str(file)], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
