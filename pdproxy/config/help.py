"""The module has the headings for the help of ``pdproxy serve``, which is made from the settings' fields."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.config.settings import Settings
from transfer.command_line import settings_help

SECTIONS = {
    "config": "The file, and where the proxy listens",
    "coordinator": "Replicas",
    "instances": "The fleet",
    "discover": "Instances that are found",
    "first_token": "What is special about some engines",
    "prefill_policy": "Who gets a request",
    "proxy_host": "KV signals",
    "model": "The model and the PD buffer",
    "admission": "Admission and the queue",
    "retries": "Retries and continued streams",
    "assemble": "Whole answers",
    "min_priority": "Priorities",
    "request_timeout_s": "Time limits",
    "probe_interval_s": "Health",
    "watch_config": "Changes while the proxy runs",
    "canary": "The canary",
    "max_body_bytes": "Sizes of requests and answers, and memory",
    "api_keys": "Keys, HTTPS and browsers",
    "log_level": "Logs and spans",
}
"""The headings, each by the option that is the first below it. Options stand in the order in which they are declared.
"""


def rows() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the heading of each option, and its two columns: how it is written, and what it means."""
    return settings_help.rows(Settings, SECTIONS)
