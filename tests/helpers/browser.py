"""A headless Chromium, spoken to in its DevTools protocol: what it takes to look at a page and press keys."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

LIMIT_S = 20.0
LOOK_S = 0.02
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def installed() -> str | None:
    """The program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `complaints` is what the browser had to say against it: errors, and what its policy forbade."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.complaints: list[str] = []

    async def begin(self) -> None:
        target = await self.tell("Target.createTarget", url="about:blank")
        attached = await self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.tell(f"{domain}.enable")

    async def hear(self) -> None:
        """Until the browser has gone."""
        async for text in self._socket:
            said = json.loads(text)
            if said.get("id") in self._answers:
                self._answers.pop(said["id"]).set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] != "network":
                self.complaints.append(said["params"]["entry"]["text"])

    async def tell(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps(message))
        async with asyncio.timeout(LIMIT_S):
            answer = await answered
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    async def prefer(self, **features: str) -> None:
        """CSS media features, their names with underscores."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.tell("Emulation.setEmulatedMedia", features=told)

    async def open(self, url: str) -> None:
        await self.tell("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        text = await self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(text)

    async def until(self, expression: str, limit_s: float = LIMIT_S) -> float:
        """Until it is true; how many seconds that took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not await self.ask(expression):
            if loop.time() - began > limit_s:
                raise TimeoutError(f"not within {limit_s:g} s: {expression}\n{await self.text('body')}")
            await asyncio.sleep(LOOK_S)
        return loop.time() - began

    async def shoot(self, file: Path, *, is_whole: bool = True) -> None:
        """A picture of it, by default of all of it and not only of what the window shows."""
        shot = await self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))

    # ── pressing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key by its name: Tab, Enter, Escape, ArrowRight, …"""
        codes = {"Backspace": 8, "Tab": 9, "Enter": 13, "Escape": 27}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.tell("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about, **text)
        await self.tell("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        await self.tell("Input.insertText", text=text)

    async def click(self, element: str) -> None:
        """With the mouse, in the middle of what that JavaScript expression is, which must be in nobody's shadow."""
        at = await self.ask(
            f"""(() => {{
              const element = {element};
              element.scrollIntoView({{ block: "center", behavior: "instant" }});
              const {{ left, top, width, height }} = element.getBoundingClientRect();
              const [x, y] = [left + width / 2, top + height / 2];
              return element.contains(document.elementFromPoint(x, y)) ? {{ x, y }} : null;
            }})()"""
        )
        assert at is not None, f"{element} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            await self.tell("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """A tab of a browser that keeps its things in `folder`. On the way out the process is gone."""
    program = installed()
    assert program is not None
    arguments = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run"]
    arguments += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    # It leaves folders there, whose names must be short, because a socket is in one.
    temporary = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": temporary.name},
    )
    try:
        address = await _address(folder / "DevToolsActivePort")
        async with (
            connect(address, max_size=None, proxy=None, ping_interval=None) as socket,
            asyncio.TaskGroup() as ears,
        ):
            page = Page(socket)
            hearing = ears.create_task(page.hear())
            await page.begin()
            yield page
            hearing.cancel()
    finally:
        await _end(process)
        temporary.cleanup()


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _address(file: Path) -> str:
    """Where it listens, once it has said so."""
    async with asyncio.timeout(LIMIT_S):
        while len(lines := _lines(file)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


def _lines(file: Path) -> list[str]:
    """None of a file that is not there yet."""
    return file.read_text().splitlines() if file.exists() else []
