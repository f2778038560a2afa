"""The page is one document with its style and its script in it; the browser may load nothing else and run nothing
else."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "web"
_SCRIPTS = ("words", "link", "card", "fleet", "flow", "slow", "details", "main")
"""The scripts in the order in which they are read; each needs only what is before it."""


@dataclass(frozen=True, slots=True)
class Page:
    content: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """Returns the page, which is read when somebody first asks for it."""
    style = _read("page.css")
    script = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    document = _read("page.html").replace("/* style */", style).replace("/* script */", script)
    return Page(document.encode(), _headers(style, script))


def _headers(style: str, script: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "style-src": _digest(style),
        "script-src": _digest(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns the hash by which a policy allows exactly this text to be applied, or run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
