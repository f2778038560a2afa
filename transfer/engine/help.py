"""The module makes the help of ``python -m transfer.engine`` from the settings' fields."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from transfer.command_line.commands import SettingsCommand
from transfer.command_line.settings_help import rows
from transfer.engine.config import EngineSettings

SECTIONS = {
    "role": "What it is and where it listens",
    "device": "How it computes",
    "chunk_size": "Pages and caches",
    "max_num_seqs": "Limits",
    "reservation": "The decoder's receiver",
    "fleet_key_file": "Keys and signals",
    "data_plane": "How KV is sent",
    "log_level": "Logs",
}
"""The headings, each by the option that is the first below it. Options stand in the order in which they are declared.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class EngineCommand(SettingsCommand):
    """EngineCommand is ``python -m transfer.engine``, as far as its help goes."""

    def settings_rows(self) -> Iterable[tuple[str, tuple[str, str]]]:
        return rows(EngineSettings, SECTIONS)


@app.command(cls=EngineCommand)
def engine() -> None:
    """Run a prefiller or decoder on torch and transformers, for laptops, tests and demonstrations.

    An option is a flag or an environment variable (--chunk-size is PDENGINE_CHUNK_SIZE). A flag beats the environment,
    and the environment beats the default.
    """
