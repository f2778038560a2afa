"""The module says how an engine reads prompts: first come, first served, several at once where they are short."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from pdproxy.simulate.calls import ENGINES
from pdproxy.simulate.speed import Speed

Finished = Callable[[], object]
"""A function that is called when the prompt has been read, and must not raise."""


class Prompt:
    """Prompt is one prompt at an engine. `group` names a prefix of `num_shared` tokens that it has in common with
    others.

    Mutable state: whether it is wanted still, and is being read.
    """

    __slots__ = ("finished", "group", "is_begun", "is_wanted", "num_shared", "num_tokens")

    def __init__(self, num_tokens: int, finished: Finished, group: int | None = None, num_shared: int = 0) -> None:
        self.num_tokens = num_tokens
        self.finished = finished
        self.group = group
        self.num_shared = num_shared
        self.is_wanted = True
        self.is_begun = False


class PrefixCache:
    """PrefixCache keeps prefixes that were read before; the oldest ones go first where there are too many tokens.

    Mutable state: the prefixes in the order of their use, and their tokens together.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._num_tokens = 0

    def take_in(self, group: int, num_tokens: int) -> int:
        """Returns how many tokens of this prefix were there; from now on all of them are."""
        num_there = self._kept.pop(group, 0)
        self._kept[group] = max(num_there, num_tokens)
        self._num_tokens += self._kept[group] - num_there
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= self._kept.popitem(last=False)[1]
        return min(num_there, num_tokens)


class PromptQueue:
    """PromptQueue reads prompts, `slowness` times as slowly as `speed` says.

    Mutable state: who waits, who is being read and since when, how much is left of that; how slow, whether frozen;
    seconds that it was busy, and tokens it has read and found in its cache.
    """

    def __init__(self, speed: Speed, *, slowness: float = 1.0, on_busy: Callable[[bool], object] | None = None) -> None:
        """Makes a queue whose `on_busy` is told when reading begins and ends."""
        self._speed = speed
        self.slowness = slowness
        self._on_busy = on_busy
        self._loop = asyncio.get_running_loop()
        self._cache = PrefixCache(speed.prefix_cache_tokens)
        self._waiting: deque[Prompt] = deque()
        self._reading: list[Prompt] = []
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self._left_s = 0.0
        self._is_frozen = False
        self._busy_s = 0.0
        self.num_read_tokens = 0
        self.num_cached_tokens = 0

    def add(self, prompt: Prompt) -> None:
        self._waiting.append(prompt)
        if not self._reading and not self._is_frozen:
            self._begin()

    def drop(self, prompt: Prompt) -> None:
        """Drops a prompt that is not wanted any more. If it is not begun, it never will be; if it is begun, its
        `finished` is not called."""
        prompt.is_wanted = False

    def freeze(self) -> None:
        """Makes time stand still here until `thaw`. Both are idempotent."""
        if not self._is_frozen:
            self._is_frozen = True
            self._pause()

    def thaw(self) -> None:
        if not self._is_frozen:
            return
        self._is_frozen = False
        if self._reading:
            self._go_on()
        else:
            self._begin()

    def clear(self) -> None:
        """Forgets everything, because the process has gone with all that it was doing and had kept."""
        self._pause()
        was_busy = bool(self._reading)
        self._waiting.clear()
        self._reading = []
        self._is_frozen = False
        self._cache = PrefixCache(self._speed.prefix_cache_tokens)
        if was_busy:
            self._tell(is_busy=False)

    @property
    def busy_s(self) -> float:
        """Returns the seconds, until now, in which it was reading."""
        running_s = self._loop.time() - self._began_at if self._timer is not None else 0.0
        return self._busy_s + running_s

    @property
    def num_waiting(self) -> int:
        """Returns how many prompts are wanted, those being read included."""
        return sum(prompt.is_wanted for prompt in (*self._reading, *self._waiting))

    def _begin(self) -> None:
        """Begins the next batch, if anything waits."""
        batch, num_tokens = self._next_batch()
        if not batch:
            return
        self._reading = batch
        self._left_s = self._speed.prefill_takes(num_tokens) * self.slowness
        self.num_read_tokens += num_tokens
        self._tell(is_busy=True)
        self._go_on()

    def _next_batch(self) -> tuple[list[Prompt], int]:
        batch: list[Prompt] = []
        num_tokens, waiting = 0, self._waiting
        while waiting:
            prompt = waiting[0]
            if not prompt.is_wanted:
                waiting.popleft()
                continue
            if batch and num_tokens + prompt.num_tokens > self._speed.prefill_batch_tokens:
                break
            waiting.popleft()
            prompt.is_begun = True
            num_tokens += self._tokens_to_read(prompt)
            batch.append(prompt)
        return batch, num_tokens

    def _tokens_to_read(self, prompt: Prompt) -> int:
        """Returns how many tokens of a prompt have to be read. The last token at least is read again, for there is an
        answer to be begun."""
        if prompt.group is None:
            return prompt.num_tokens
        num_there = min(self._cache.take_in(prompt.group, prompt.num_shared), prompt.num_tokens - 1)
        self.num_cached_tokens += num_there
        return prompt.num_tokens - num_there

    def _go_on(self) -> None:
        self._began_at = self._loop.time()
        self._timer = self._loop.call_later(self._left_s, self._end, context=ENGINES)

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            passed_s = self._loop.time() - self._began_at
            self._busy_s += passed_s
            self._left_s = max(0.0, self._left_s - passed_s)

    def _end(self) -> None:
        self._timer = None
        self._busy_s += self._loop.time() - self._began_at
        batch, self._reading = self._reading, []
        self._tell(is_busy=False)
        for prompt in batch:
            if prompt.is_wanted:
                prompt.finished()
        if not self._reading and not self._is_frozen:
            self._begin()

    def _tell(self, *, is_busy: bool) -> None:
        if self._on_busy is not None:
            self._on_busy(is_busy)
