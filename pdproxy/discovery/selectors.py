"""Label selectors of Kubernetes, checked before a cluster is asked by them: it would refuse them again and again."""

from __future__ import annotations

import re

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE = rf"(?:{_NAME})?"
_VALUES = rf"\(\s*{_VALUE}\s*(?:,\s*{_VALUE}\s*)*\)"
_COMPARED = rf"\s*(?:==?|!=)\s*{_VALUE}|\s*[<>]\s*[0-9]+|\s+(?:not)?in\s*{_VALUES}"
_REQUIREMENT = rf"\s*(?:!\s*{_KEY}|{_KEY}(?:{_COMPARED})?)\s*"
_SELECTOR = re.compile(rf"{_REQUIREMENT}(?:,{_REQUIREMENT})*")
"""The grammar of https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors."""


def is_selector(text: str) -> bool:
    """Tells whether Kubernetes takes `text` as a label selector, by equality or by sets."""
    return _SELECTOR.fullmatch(text) is not None
