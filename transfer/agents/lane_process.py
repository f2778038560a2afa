"""The receiving end of a lane check as a process: ``python -m transfer.agents.lane_process DESCRIPTOR``, which
`EndProcess` starts.

The process ends when `EndProcess` closes the socket behind the descriptor, and is killed by the kernel when the process
that started it dies.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any

import msgspec
import torch

from transfer.agents.device import resolve
from transfer.agents.lane_end import Offer, OwnEnd
from transfer.agents.nixl import NixlAgent
from transfer.agents.nixl_options import NixlOptions
from transfer.child_process import LENGTH_BYTES, end_with_parent, frame, start
from transfer.errors import TransferError

START_LIMIT_S = 120.0
"""The time, in seconds, within which the process must be ready. It imports torch and opens the GPU."""
ANSWER_LIMIT_S = 10.0
"""The time, in seconds, within which it must answer."""
END_LIMIT_S = 5.0
"""The time, in seconds, within which it must end when it is told to; then it is killed."""


class Setup(msgspec.Struct):
    """`Setup` is what the process is told first."""

    parent: int
    num_bytes: int
    device: str
    options: NixlOptions


class Answer(msgspec.Struct, omit_defaults=True):
    """An `Answer` is what the process says of itself, or to one command: ``clear`` or ``num_wrong``."""

    offer: Offer | None = None
    num_wrong: int = 0
    error: str | None = None


class EndProcess:
    """An `EndProcess` is a receiving end in a process of its own, with the same arguments as `OwnEnd`. It starts at
    once, and is ready when `offer` returns. Use it as a context manager: leaving it ends the process."""

    def __init__(self, num_bytes: int, device: torch.device, options: NixlOptions) -> None:
        try:
            self._process, self._socket = start("transfer.agents.lane_process")
        except OSError as error:
            raise TransferError(f"the receiving end of the lane check cannot be started: {error}") from error
        self._setup = Setup(os.getpid(), num_bytes, str(device), options)

    def __enter__(self) -> EndProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def offer(self) -> Offer:
        offer = self._ask(self._setup, START_LIMIT_S).offer
        assert offer is not None
        return offer

    def clear(self) -> None:
        self._ask("clear", ANSWER_LIMIT_S)

    def num_wrong(self) -> int:
        return self._ask("num_wrong", ANSWER_LIMIT_S).num_wrong

    def _ask(self, message: object, limit_s: float) -> Answer:
        self._socket.settimeout(limit_s)
        try:
            _send(self._socket, message)
            answer: Answer = _receive(self._socket, Answer)
        except TimeoutError:
            reason = f"did not answer within {limit_s:g} s"
        except ConnectionError:  # it has closed its end
            reason = f"ended with status {self._end()}"
        else:
            if answer.error is None:
                return answer
            reason = f"could not start: {answer.error}"
        raise TransferError(f"the receiving end of the lane check, a process on {self._setup.device}, {reason}")

    def _end(self) -> int:
        """Ends the process. Returns its exit status."""
        self._socket.close()
        try:
            return self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def main(descriptor: str) -> None:
    end_with_parent()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            serve(connection)
        except ConnectionError:
            return  # the other side has what it wanted, or is gone


def serve(connection: socket.socket) -> None:
    """Carries out what the other side says. Raises `ConnectionError` when that side closes its end."""
    setup = _receive(connection, Setup)
    if os.getppid() != setup.parent:
        return  # it died before this process was tied to its life

    def new_agent(epoch: str) -> NixlAgent:
        return NixlAgent(epoch, receives=True, options=setup.options, device=setup.device)

    try:
        end = OwnEnd(setup.num_bytes, resolve(setup.device), new_agent)
    except (TransferError, RuntimeError, OSError) as error:  # RuntimeError: torch cannot use the GPU
        _send(connection, Answer(error=str(error)))
        return
    with end:
        try:
            offer = end.offer()
        except TransferError as error:
            _send(connection, Answer(error=str(error)))
            return
        _send(connection, Answer(offer))
        while True:
            if _receive(connection, str) == "clear":
                end.clear()
                _send(connection, Answer())
            else:
                _send(connection, Answer(num_wrong=end.num_wrong()))


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(frame(message))


def _receive(connection: socket.socket, kind: type[Any]) -> Any:
    """Returns the next message. Raises `ConnectionError` where the other side has closed its end, and `TimeoutError`.

    The socket's timeout is that of each part of a message. No message is larger than a few KiB.
    """
    size = int.from_bytes(_receive_exactly(connection, LENGTH_BYTES))
    return msgspec.msgpack.decode(_receive_exactly(connection, size), type=kind)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has closed its end")
        data += part
    return bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
