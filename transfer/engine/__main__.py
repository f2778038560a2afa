"""``python -m transfer.engine`` runs one built-in engine as a process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvicorn
from pydantic import ValidationError
from pydantic_settings import SettingsError

from transfer import logs
from transfer.descriptors import RESERVE, Descriptors, raise_limit
from transfer.engine.config import PROGRAM, EngineSettings
from transfer.errors import TransferError
from transfer.wire import bracketed

if TYPE_CHECKING:
    from transfer.engine.ranks.link import Link

log = logging.getLogger("transfer.engine")

ENDING = (signal.SIGINT, signal.SIGTERM)
CLOSE_LIMIT_S = 15.0
"""The time, in seconds, that an engine has to close itself. Then its stacks are printed, and it ends with status 1."""


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        from transfer.engine.help import app

        app(prog_name=PROGRAM)
    settings = _settings()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL's Python package reads it when it is imported
    if not (settings.model / "config.json").is_file():
        sys.exit(f"error: --model: {settings.model} is not a folder with a config.json")
    if missing := [name for name in ("torch", "nixl") if find_spec(name) is None]:
        way_out = "pip install 'pdproxy[engine]' (in a checkout: scripts/install engine)"
        sys.exit(f"error: this Python has no {', '.join(missing)}; {way_out}")
    raise_limit()
    from transfer.engine.ranks.start import start_ranks

    rank, links = start_ranks(settings.tensor_parallel_size)
    logs.configure(settings.log_level)  # not earlier: it starts a thread
    try:
        if rank == 0:
            asyncio.run(serve(settings, links))
        else:
            from transfer.engine.ranks.follower import follow

            follow(settings, rank, links[0])
    except (TransferError, OSError) as error:
        logs.end_with(error)


def _settings() -> EngineSettings:
    """Returns the settings of this command line and environment. What is wrong with them is printed, and ends the
    process with status 2."""
    try:
        return EngineSettings(_cli_parse_args=True)
    except ValidationError as error:
        wrong = [f"{_flag(one['loc'])}{one['msg'].removeprefix('Value error, ')}" for one in error.errors()]
    except SettingsError as error:
        from transfer.command_line.settings_help import suggestion

        wrong = [f"{error}{suggestion(EngineSettings, str(error))}; {PROGRAM} --help lists the options"]
    print(*(f"error: {one}" for one in wrong), sep="\n", file=sys.stderr)  # noqa: T201
    sys.exit(2)


async def serve(settings: EngineSettings, links: list[Link]) -> None:
    """Loads the model, listens, and serves until SIGINT or SIGTERM. Then closes the engine, for `CLOSE_LIMIT_S` seconds
    at most, so that an end in order leaves nothing behind.

    `links` are those to the other ranks. Raises `TransferError` or `OSError` when it cannot start, and `RankLost` when
    it has ended with another rank.
    """
    from transformers import AutoTokenizer

    from transfer.bounded_connection import BoundedConnection
    from transfer.engine.engine import Engine
    from transfer.engine.ranks.leader import OtherRanks
    from transfer.engine.server import EngineServer, ServerSettings, build_app

    tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    ranks = OtherRanks(links)
    engine = Engine(settings, ranks)
    lost = asyncio.Event()
    try:
        await engine.start(lost.set)
        descriptors = Descriptors()
        limits = ServerSettings(max_body_bytes=settings.max_body_bytes, memory_budget=settings.memory_budget)
        app = build_app(engine, tokenizer, limits, descriptors)
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            host=settings.host,
            port=settings.port,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            lifespan="off",
        )
        place = f"{bracketed(settings.host)}:{settings.port}"
        log.info("serving %s as %s on http://%s", engine.model.name, settings.role, place)
        log.info("%d descriptors: enough for about %d connections", descriptors.limit, descriptors.num_free - RESERVE)
        server = EngineServer(config, descriptors)
        # uvicorn gives the signals back to whom it has them from, and the engine is still to be closed then.
        for number in ENDING:
            signal.signal(number, server.handle_exit)
        await serve_until(lost, server)
        if ranks.lost is not None:
            raise ranks.lost
    finally:
        # A thread that is stuck in a driver would keep the process. This watches on until the interpreter is gone.
        faulthandler.dump_traceback_later(CLOSE_LIMIT_S, exit=True)
        await engine.aclose()


async def serve_until(lost: asyncio.Event, server: uvicorn.Server) -> None:
    """Serves until a signal comes, or until `lost` is set."""
    waiting = asyncio.create_task(lost.wait())
    waiting.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def _flag(location: tuple[int | str, ...]) -> str:
    return "--" + "-".join(str(part) for part in location).replace("_", "-") + ": " if location else ""


if __name__ == "__main__":
    main()
