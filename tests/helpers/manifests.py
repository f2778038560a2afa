"""Kubernetes objects as operators get them: what kubectl makes of the overlays, and helm of the chart."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import programs

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
OVERLAYS = KUBERNETES / "overlays"
CHART = ROOT / "examples" / "helm" / "pdproxy"
VERSIONS = ("1.31", "1.34")
"""Releases of Kubernetes whose schemas the objects are held against."""
MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
Object = dict[str, Any]


@cache
def built(folder: Path) -> tuple[Object, ...]:
    return _objects(programs.output_of(programs.kubectl(), "kustomize", folder))


def overlay(name: str) -> tuple[Object, ...]:
    return built(OVERLAYS / name)


def component(name: str, scratch: Path) -> tuple[Object, ...]:
    """What a component adds by itself: of an overlay with nothing else, which is written to `scratch`."""
    path = os.path.relpath(KUBERNETES / "components" / name, scratch.resolve())
    (scratch / "kustomization.yaml").write_text(f"components: [{path}]\n")
    return built(scratch)


@cache
def chart(*settings: str, release: str = "pdproxy") -> tuple[Object, ...]:
    words = [word for one in settings for word in ("--set", one)]
    return _objects(programs.output_of(programs.helm(), "template", release, CHART, "--namespace", "llm", *words))


def _objects(text: str) -> tuple[Object, ...]:
    return tuple(one for one in yaml.safe_load_all(text) if one is not None)


def check_schema(one: Object) -> None:
    """Raises an error where the object is none of its kind, or has a field that its kind has not."""
    if one["apiVersion"] in MODELS:
        _check_model(one)
        return
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("NOT TESTED against Kubernetes' schemas: pip install kubernetes-validate (extra: dev)")
    import kubernetes_validate

    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


def _check_model(one: Object) -> None:
    """The models take fields that they do not know, and forget them."""
    name = MODELS[one["apiVersion"]]
    try:
        importlib.metadata.version(name.rpartition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(
            f"NOT TESTED against the schema of {one['kind']}: pip install {name.rpartition('.')[0]} (extra: dev)"
        )
    module = importlib.import_module(name)
    kept = getattr(module, one["kind"]).model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
    lost = sorted(set(_leaves(one)) - set(_leaves(kept)))
    assert not lost, f"{one['kind']} has no {lost}"


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """The way to each value, with the value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}")
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield f"{path} = {value}"


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def pod_of(one: Object) -> Object:
    """The pods of a Deployment: labels and spec."""
    found: Object = one["spec"]["template"]
    return found


def proxy_of(objects: tuple[Object, ...]) -> Object:
    """The Deployment of the proxy."""
    [found] = [one for one in of_kind(objects, "Deployment") if one["metadata"]["name"] == "pdproxy"]
    return found
