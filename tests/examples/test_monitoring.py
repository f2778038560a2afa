"""The board and the rules name what is there, and each alert fires when it should and at no other time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import programs
from tests.helpers.watched_metrics import RULES, metrics_in, panels, queries, recorded_in, rules
from tests.pdproxy.telemetry.test_metrics_page import documented

OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus gives to everything that it scrapes."""
RENAMED = "exported_instance"
"""The proxy's own label `instance`, as Prometheus stores it beside its own."""
NOT_OURS = {"process_resident_memory_bytes"}


def test_every_metric_and_label_is_one_that_the_proxy_tells() -> None:
    known = documented()
    seen = 0
    for where, query in queries():
        for name, labels in metrics_in(query).items():
            if name in NOT_OURS:
                continue
            assert name in known, f"{where}: docs/metrics.md has no {name}"
            told = {RENAMED if one == "instance" else one for one in known[name][1]}
            assert labels <= told | OF_TARGETS, f"{where}: {name} has no label {labels - told - OF_TARGETS}"
            seen += 1
    assert seen > 80


def test_every_recorded_figure_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for _, query in queries() for name in recorded_in(query)}
    assert used == used & recorded
    assert len(used) > 4


def test_histograms_are_read_as_histograms() -> None:
    """And everything else is not: a query of a histogram's bare name finds nothing, without an error."""
    kinds = {name: kind for name, (kind, _) in documented().items()}
    for where, query in queries():
        for name in re.findall(r"(?<![:\w])pdproxy_\w+\b(?!:)", query):
            if (family := name.removesuffix("_bucket")) in kinds:
                assert (kinds[family] == "histogram") == name.endswith("_bucket"), f"{where}: {name}"


def test_counters_are_read_as_rates() -> None:
    counters = {name for name, (kind, _) in documented().items() if kind == "counter"}
    for where, query in queries():
        for name in counters & metrics_in(query).keys():
            assert re.search(rf"(rate|increase)\({name}\b", query), f"{where}: {name} only grows"


def test_the_board_has_no_panel_over_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels())


# ── alerts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

DECODER = 'job="p",exported_instance="decode-0"'
OF_DECODER = {"job": "p", "exported_instance": "decode-0"}
Series = dict[str, str]
"""Values by series, in promtool's notation: one a minute."""


@dataclass
class Case:
    """One alert: `fires` makes it fire at minute `at` with `labels`; `silent` is as near as may be, and does not."""

    fires: Series
    silent: Series
    at: int = 10
    labels: dict[str, str] = field(default_factory=lambda: {"job": "p"})
    value: str = ""
    """As the summary tells it."""


def _requests(**rates: int) -> Series:
    labels = 'job="p",path="disaggregated",reason="fits"'
    return {f'pdproxy_requests_total{{{labels},outcome="{name}"}}': f"0+{rate}x20" for name, rate in rates.items()}


def _leads(*values: str) -> Series:
    return {f'pdproxy_replica_leads{{job="p",instance="{number}"}}': one for number, one in enumerate(values)}


def _lag(in_time: int) -> Series:
    name = "pdproxy_event_loop_lag_seconds_bucket"
    return {
        f'{name}{{job="p",le="{le}"}}': f"0+{num}x20" for le, num in (("0.05", in_time), ("0.1", 600), ("+Inf", 600))
    }


def _grows(name: str, labels: str = 'job="p"', told: dict[str, str] | None = None) -> Case:
    """A counter for which any increase counts."""
    series = f"{name}{{{labels}}}"
    return Case({series: "0 0 0 1 1 2 3x10"}, {series: "7x20"}, labels=told or {"job": "p"})


def _routable(*values: str) -> Series:
    name = "pdproxy_instance_routable"
    both = {f'{name}{{job="p",role="prefill",exported_instance="{number}"}}': one for number, one in enumerate(values)}
    return {f'{name}{{{DECODER},role="decode"}}': "1x10", **both}


def _lasts(name: str, labels: str, values: str, silent: str, at: int, told: dict[str, str], value: str = "") -> Case:
    return Case({f"{name}{{{labels}}}": values}, {f"{name}{{{labels}}}": silent}, at, told, value)


CASES = {
    "PdproxyAbsent": Case({}, {'pdproxy_build_info{job="p"}': "1x10"}, 3, {}),
    "PdproxyNobodyRoutable": Case(_routable("0x10"), _routable("0x10", "1x10"), 2, {"job": "p", "role": "prefill"}),
    "PdproxyNoLeader": Case(_leads("0x10", "0x10"), _leads("0x10", "1x10"), 2),
    "PdproxyTwoLeaders": Case(_leads("1x10", "1x10"), _leads("1 1 0x10", "0 1 1x10"), 2),
    "PdproxyRequestsFail": Case(
        _requests(done=90, failed=10), _requests(done=96, failed=4, refused=90), 15, value="10%"
    ),
    "PdproxyQueueTimesOut": _grows("pdproxy_queue_timeouts_total", DECODER),
    "PdproxyQueueFull": _grows("pdproxy_queue_full_total", DECODER),
    "PdproxyMemoryRefused": _grows("pdproxy_memory_refused_total"),
    "PdproxyDescriptorsRefused": _grows("pdproxy_descriptors_refused_total", 'job="p",what="request"'),
    "PdproxyWrongTags": _grows("pdproxy_instance_wrong_tags_total", f'{DECODER},role="decode"', OF_DECODER),
    "PdproxyPagesExpire": _grows("pdproxy_reaper_attempts_total", 'job="p",outcome="expired"'),
    "PdproxyWorkersLost": _grows("pdproxy_workers_lost_total"),
    "PdproxyLogDropped": _grows("pdproxy_log_records_dropped_total"),
    "PdproxyInstanceDown": _lasts(
        "pdproxy_instance_state",
        f'{DECODER},role="decode",state="down"',
        "1x10",
        "1 1 1 0 1x10",
        6,
        OF_DECODER | {"role": "decode"},
    ),
    "PdproxyBreakerOpens": _lasts(
        "pdproxy_breaker_opened_total",
        f'{DECODER},leg="decode"',
        "0+1x10",
        "0 0 1x10",
        10,
        OF_DECODER | {"leg": "decode"},
    ),
    "PdproxySlotsForeign": _lasts("pdproxy_slots_foreign", DECODER, "3x10", "3 0x10", 2, OF_DECODER, "3"),
    "PdproxySlotsOverdue": _lasts("pdproxy_slots_overdue", DECODER, "3x10", "3 0x10", 2, OF_DECODER),
    "PdproxyStoreSilent": _lasts(
        "pdproxy_store_silent_seconds",
        'job="p",instance="a"',
        "5 65x10",
        "1x10",
        1,
        {"job": "p", "instance": "a"},
        "1m 5s",
    ),
    "PdproxyLoopLags": Case(_lag(590), _lag(600), 15, value="70ms"),
}


def told(text: str, case: Case) -> str:
    """An annotation, as Prometheus writes it for this case."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: case.labels[label[1]], text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", case.value, text)


def unit_test(rule: dict[str, Any], case: Case, *, fires: bool) -> dict[str, Any]:
    alert = {
        "exp_labels": case.labels | rule["labels"],
        "exp_annotations": {name: told(text, case) for name, text in rule["annotations"].items()},
    }
    expected = [alert] if fires else []
    series = case.fires if fires else case.silent
    return {
        "name": f"{rule['alert']} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": rule["alert"], "exp_alerts": expected}],
    }


def test_every_alert_fires_and_is_silent(tmp_path: Path) -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert alerts.keys() == CASES.keys()
    tests = [unit_test(rule, CASES[name], fires=fires) for name, rule in alerts.items() for fires in (True, False)]
    file = tmp_path / "alerts.test.yaml"
    file.write_text(
        json.dumps({"rule_files": [str(path) for path in RULES], "evaluation_interval": "30s", "tests": tests})
    )
    programs.output_of(programs.promtool(), "test", "rules", file)


def test_promtool_finds_nothing_to_say() -> None:
    said = programs.output_of(programs.promtool(), "check", "rules", "--lint=all", "--lint-fatal", *RULES)
    assert said.count("SUCCESS") == len(RULES)


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
            assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]


def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    path = RULES[0].with_name("prometheus.yaml")
    told = yaml.safe_load(path.read_text())
    assert {Path(one).name for one in told["rule_files"]} == {one.name for one in RULES}
    copy = tmp_path / "prometheus.yaml"
    copy.write_text(path.read_text())
    for one in RULES:
        (tmp_path / one.name).write_text(one.read_text())
    assert "SUCCESS" in programs.output_of(programs.promtool(), "check", "config", copy)


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fleet(**pages: tuple[str, str, str, str]) -> Series:
    """Instances by name, each with its role and with pages: held, waited for, and those that there are."""
    series: Series = {}
    for name, (role, *figures) in pages.items():
        of_one = f'job="p",instance="10.0.0.1:9100",exported_instance="{name}"'
        series[f'pdproxy_instance_ready{{{of_one},role="{role}"}}'] = "1x5"
        for metric, figure in zip(("slots_held", "queue_pages", "slots_capacity"), figures, strict=True):
            series[f"pdproxy_{metric}{{{of_one}}}"] = " ".join([figure] * 5)
    return series


def test_pools_are_scaled_by_pages_in_instances_worth(tmp_path: Path) -> None:
    """Those of the other role, and those without admission, count for nothing; the figures of a replica that led until
    just now do not count twice."""
    fleet = _fleet(
        a=("decode", "80", "20", "100"), b=("decode", "25", "25", "100"), c=("decode", "9", "0", "Inf"),
        d=("prefill", "30", "10", "10"),
    )  # fmt: skip
    before = {name.replace("10.0.0.1", "10.0.0.2"): values for name, values in fleet.items()}
    asked = {where: query for where, query in queries() if where.startswith("scale") and "slots_held" in query}
    expected = {"scale: pdproxy-prefill 1": 4.0, "scale: pdproxy-decode 1": 1.5}
    assert asked.keys() == expected.keys()
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": value}]}
                for where, query in asked.items()
                for value in [expected[where] if series else 0.0]
            ],
        }
        for series in (fleet, fleet | before, {})
    ]
    file = tmp_path / "pools.test.yaml"
    file.write_text(json.dumps({"rule_files": [], "evaluation_interval": "30s", "tests": tests}))
    programs.output_of(programs.promtool(), "test", "rules", file)
