"""The page as a document: whole, on its own, and able to run nothing but what it came with."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from pdproxy.dashboard import page as page_module
from pdproxy.dashboard.page import page
from tests.fakes.proxy_harness import proxy_in_front_of


class Document(HTMLParser):
    """Tags with their attributes, and the text of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {"style": "", "script": ""}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.inside:
            self.inside[self._tag] += data


TEXT = page().content.decode()
DOCUMENT = Document(TEXT)


def policy() -> dict[str, str]:
    parts = page().headers["content-security-policy"].split("; ")
    return dict((*part.partition(" ")[::2],) for part in parts)


async def test_served() -> None:
    async with proxy_in_front_of(api_keys=("client",)) as house:
        answer = await house.get("/ui")
        assert (answer.status, answer.body) == (200, page().content)
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers.items() >= page().headers.items()


def test_only_its_own_style_and_script_count() -> None:
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        digest = base64.b64encode(hashlib.sha256(DOCUMENT.inside[tag].encode()).digest()).decode()
        assert policy()[directive] == f"'sha256-{digest}'"
        assert len(DOCUMENT.inside[tag]) > 1000
        assert [name for name, _ in DOCUMENT.tags].count(tag) == 1
    assert policy()["default-src"] == policy()["frame-ancestors"] == policy()["base-uri"] == "'none'"
    assert policy()["require-trusted-types-for"] == "'script'"


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_styled_or_run_in_place() -> None:
    for tag, attributes in DOCUMENT.tags:
        assert not {name for name in attributes if name == "style" or name.startswith("on")}, tag
        assert "src" not in attributes, tag
        target = attributes.get("href") or "data:"
        assert target.startswith("data:") or ":" not in target, "below wherever the proxy is"
    addresses = set(re.findall(r"https?://[^\s'\"]+", TEXT))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "@import" not in TEXT
    assert "url(" not in DOCUMENT.inside["style"]


def test_every_script_is_in_it_and_finds_what_it_looks_for() -> None:
    files = {file.stem for file in page_module._FOLDER.glob("*.js")}
    assert files == set(page_module._SCRIPTS)
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', DOCUMENT.inside["script"]))
    there = {attributes["id"] for _, attributes in DOCUMENT.tags if "id" in attributes}
    assert wanted <= there
    assert len(wanted) > 20


def test_what_others_wrote_is_shown_as_text() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert way not in DOCUMENT.inside["script"]
