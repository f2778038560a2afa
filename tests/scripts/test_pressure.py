"""What `scripts/soak.py --pressure` calls wrong. The run itself is one of CI's commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.dev.common.vitals import Vitals
from scripts.dev.soak.pressure import Ordinary, PressureFindings, make_pressure_report, pressure_problems


def findings() -> PressureFindings:
    well = PressureFindings(1, is_complete=True, peak_rss_mb=200.0)
    well.before = well.after = Vitals(num_fds=20, num_threads=2, num_tasks=0, rss_mb=80.0)
    well.quiet = Ordinary([0.5] * 100, [0.02] * 100)
    well.pressed = Ordinary([0.6] * 100, [0.03] * 100)
    return well


def leave(found: PressureFindings, num_fds: int = 20, rss_mb: float = 80.0) -> None:
    found.after = Vitals(num_fds=num_fds, num_threads=2, num_tasks=0, rss_mb=rss_mb)


WRONG: dict[str, Callable[[PressureFindings], object]] = {
    "not finished": lambda found: setattr(found, "is_complete", False),
    "failed in the quiet": lambda found: found.quiet.complaints.append("HTTP 502"),
    "failed under pressure": lambda found: found.pressed.complaints.append("HTTP 503"),
    "times that of the quiet": lambda found: found.pressed.durations_s.extend([0.8] * 5),
    "judged down": lambda found: found.judged_down.add("well-decode: down"),
    "memory rose": lambda found: setattr(found, "peak_rss_mb", 700.0),
    "memory stays": lambda found: leave(found, rss_mb=300.0),
    "descriptors are left": lambda found: leave(found, num_fds=40),
    "pages are held": lambda found: setattr(found, "num_held", 1),
    "in flight at the end": lambda found: found.in_flight.append({}),
}


def test_nothing_is_wrong_with_a_proxy_that_stood_it() -> None:
    assert pressure_problems(findings()) == []
    assert make_pressure_report(findings())["ratio"] == 1.2


@pytest.mark.parametrize("words", WRONG)
def test_each_wrong_is_told_alone(words: str) -> None:
    found = findings()
    WRONG[words](found)
    (told,) = pressure_problems(found)
    assert words in told
