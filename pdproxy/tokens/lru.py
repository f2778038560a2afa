"""The module holds a memory of bounded size. It keeps longest the values that were asked for last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """An `LruCache` keeps values by digest, at most `limit_bytes` of them together. Several threads may use it.

    `overhead_bytes` is what each value costs besides its own size.

    Mutable state, guarded by `_lock`: the values with their sizes, least recently used first; the sum of the sizes.
    """

    def __init__(self, limit_bytes: int, *, overhead_bytes: int = 256) -> None:
        self._limit_bytes = limit_bytes
        self._overhead_bytes = overhead_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> T | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: T, num_bytes: int) -> None:
        """Keeps `value`, of `num_bytes`, under `key`, and drops the old value there. A value larger than all the room
        is not kept.
        """
        num_bytes += self._overhead_bytes
        with self._lock:
            self._drop(key)
            if num_bytes > self._limit_bytes:
                return
            self._kept[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._limit_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._kept.pop(key, (None, 0))[1]

    def __repr__(self) -> str:
        return f"<LruCache: {len(self._kept)} values, {self._num_bytes} of {self._limit_bytes} bytes>"
