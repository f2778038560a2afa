"""``python -m transfer.engine``: one built-in engine as a process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from transfer.engine.config import EngineSettings
from transfer.errors import TransferError

log = logging.getLogger("transfer.engine")


def main() -> None:
    try:
        settings = CliApp.run(EngineSettings)
    except ValidationError as error:
        sys.exit("\n".join(f"error: {_flag(e['loc'])}{e['msg'].removeprefix('Value error, ')}" for e in error.errors()))
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL's Python package reads it when it is imported
    if not (settings.model / "config.json").is_file():
        sys.exit(f"error: --model: {settings.model} is not a folder with a config.json")
    try:
        asyncio.run(serve(settings))
    except (TransferError, OSError) as error:
        sys.exit(f"error: {error}")


async def serve(settings: EngineSettings) -> None:
    """Load, listen, and serve until SIGINT or SIGTERM. Raises `TransferError` or `OSError` when it cannot start."""
    from transformers import AutoTokenizer

    from transfer.engine.engine import Engine
    from transfer.engine.server import ServerSettings, build_app

    tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    engine = Engine(settings)
    await engine.start()
    try:
        app = build_app(engine, tokenizer, ServerSettings(max_body_bytes=settings.max_body_bytes))
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            lifespan="off",
        )
        log.info("serving %s as %s on http://%s:%d", engine.model.name, settings.role, settings.host, settings.port)
        await uvicorn.Server(config).serve()
    finally:
        await engine.aclose()


def _flag(location: tuple[int | str, ...]) -> str:
    return "--" + "-".join(str(part) for part in location).replace("_", "-") + ": " if location else ""


if __name__ == "__main__":
    main()
