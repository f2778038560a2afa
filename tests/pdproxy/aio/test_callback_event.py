"""The event that calls back."""

from __future__ import annotations

import asyncio

from pdproxy.aio.callback_event import CallbackEvent


def test_everybody_is_called_once_in_order() -> None:
    heard: list[str] = []
    flag = CallbackEvent()
    flag.on_set(lambda: heard.append("first"))
    flag.on_set(lambda: heard.append("second"))
    assert heard == []
    flag.set()
    flag.set()
    assert heard == ["first", "second"]


def test_who_comes_late_is_called_at_once_and_who_left_is_not() -> None:
    heard: list[str] = []

    def early() -> None:
        heard.append("early")

    flag = CallbackEvent()
    flag.on_set(early)
    flag.forget(early)
    flag.forget(early)
    flag.set()
    assert heard == []
    flag.on_set(lambda: heard.append("late"))
    assert heard == ["late"]


async def test_it_can_be_waited_for_by_several_of_whom_some_give_up() -> None:
    flag = CallbackEvent()
    waiting = [asyncio.create_task(flag.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert "2 to be called" in repr(flag)
    flag.set()
    await asyncio.gather(*waiting[1:])
    await flag.wait()
    assert waiting[0].cancelled()
