"""What operators are given to watch a proxy with: the board, the rules, and the queries that pools are scaled by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
MONITORING = EXAMPLES / "monitoring"
BOARD, RULES = MONITORING / "grafana-board.json", tuple(sorted(MONITORING.glob("*.rules.yaml")))
_OURS = re.compile(r"(?<![:\w])(pdproxy_\w+|process_\w+)\b(?!:)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every query, with where it stands."""
    for panel in panels():
        for target in panel.get("targets", []):
            yield f"board: {panel['title']}", target["expr"]
    for rule in rules():
        yield f"rule: {rule.get('alert') or rule['record']}", rule["expr"]
    for path in sorted(EXAMPLES.glob("kubernetes/**/*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            if isinstance(one, dict) and one.get("kind") == "ScaledObject":
                for number, trigger in enumerate(one["spec"]["triggers"]):
                    yield f"scale: {one['metadata']['name']} {number}", trigger["metadata"]["query"]


def metrics_in(query: str) -> dict[str, set[str]]:
    """Returns the names of metrics in a query, each with the labels that it is chosen by."""
    found: dict[str, set[str]] = {}
    for name, matchers in _OURS.findall(query):
        family = re.sub(r"_bucket$", "", name)
        found.setdefault(family, set()).update(_MATCHER.findall(matchers))
    return found


def recorded_in(query: str) -> set[str]:
    """Returns the names of recorded figures in a query."""
    return set(re.findall(r"\b\w+:pdproxy_\w+:\w+", query))
