"""docs/configuration.md is what the options say."""

from __future__ import annotations

import pytest

from pdproxy.config.settings import Settings
from scripts.dev import configuration_page
from scripts.dev.configuration_page import COMMAND, PAGE, page
from transfer.engine.config import EngineSettings


def rows_of(name: str) -> list[list[str]]:
    """Returns the cells of every row that is about this option: the proxy's first, then the engine's."""
    lines = [line for line in page().splitlines() if line.startswith(f"| `{name}` |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_is_what_the_options_say() -> None:
    assert PAGE.read_text() == page(), f"run: {COMMAND}"


@pytest.mark.parametrize(("model", "prefix"), [(Settings, "PDPROXY_"), (EngineSettings, "PDENGINE_")])
def test_every_option_is_there(model: type[Settings] | type[EngineSettings], prefix: str) -> None:
    text = page()
    missing = [name for name in model.model_fields if f"`{prefix}{name.upper()}`" not in text]
    assert missing == (["instances", "models"] if model is Settings else [])


class TestCells:
    def test_sizes_have_units(self) -> None:
        proxy, instance, engine = rows_of("pd_buffer_size")
        assert (proxy[3], proxy[4]) == ("size", "–")
        assert instance[1] == "size"
        assert (engine[3], engine[4]) == ("size", "`256MiB`")

    def test_switches_have_two_flags(self) -> None:
        (row,) = rows_of("admission")
        assert row[2:5] == ["`--admission`, `--no-admission`", "on or off", "on"]

    def test_numbers_have_bounds(self) -> None:
        assert rows_of("probe_misses")[0][3] == "whole number, 1 or more"
        assert rows_of("port")[0][3] == "whole number, 0 to 65535"
        assert rows_of("kv_timeout_s")[0][3] == "seconds, above 0"
        assert rows_of("retry_min_per_s")[0][3] == "number, 0 or more"

    def test_keys_are_not_given_on_the_command_line(self) -> None:
        assert {row[2] for row in rows_of("attempt_key")} == {"–"}

    def test_tables_stand_in_the_file_only(self) -> None:
        (row,) = rows_of("instances")
        assert row[1:4] == ["–", "–", "tables"]

    def test_text_that_markdown_would_read(self) -> None:
        assert configuration_page._meaning("One of `*` | all. ") == "one of `\\*` \\| all"

    def test_a_section_that_begins_with_no_option(self) -> None:
        with pytest.raises(ValueError, match="begin with no option of Settings"):
            list(configuration_page._sections(Settings, {"nothing": "Nothing"}))
