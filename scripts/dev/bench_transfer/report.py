"""The findings as plain values for a JSON file, as a table for people, and as sentences where the transfer falls
short."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from scripts.dev.bench_transfer.plan import KIB, LAYERS, MIB, Plan
from scripts.dev.bench_transfer.samples import Measured
from transfer.command_line.tables import Table

MIN_RATIO_TO_NIXL = 0.95
FROM_PAGE_BYTES = 64 * KIB
MAX_ADDED_US = 150.0
MAX_EXPOSED_LAYERS = 2.0
MAX_IDLE_PERCENT = 1.0


@dataclass(slots=True)
class OnMemory:
    """`OnMemory` holds all that was measured with the pages on one device. It grows while the run measures."""

    memory: str
    """The kind of memory, ``DRAM`` or ``VRAM``."""
    cases: list[Measured] = field(default_factory=list)
    latency: dict[str, Any] | None = None
    layerwise: dict[str, Any] | None = None
    idle: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {"latency": self.latency, "layerwise": self.layerwise, "idle": self.idle}


@dataclass(slots=True)
class Findings:
    """`Findings` hold what one run found. They grow while it runs, so that an interrupted one has something to tell."""

    plan: Plan
    seed: int
    date: str
    """The time when the run began, in ISO 8601."""
    machine: dict[str, Any]
    ucx: dict[str, str]
    devices: list[OnMemory] = field(default_factory=list)


def make_report(findings: Findings, *, is_complete: bool) -> dict[str, Any]:
    """Returns the report. ``latency``, ``layerwise`` and ``idle`` are those of host memory; a GPU's are under
    ``vram``."""
    by_memory = {device.memory: device.as_json() for device in findings.devices}
    report = {
        "date": findings.date,
        "is_complete": is_complete,
        "seed": findings.seed,
        "rounds": findings.plan.rounds,
        "machine": findings.machine,
        "ucx": findings.ucx,
        **by_memory.get("DRAM", OnMemory("DRAM").as_json()),
        "rows": [make_row(measured, device.memory) for device in findings.devices for measured in device.cases],
    }
    if "VRAM" in by_memory:
        report["vram"] = by_memory["VRAM"]
    return report


def make_row(measured: Measured, memory: str) -> dict[str, Any]:
    """Returns medians over the rounds; the ratios are medians of ratios. `pages` are those of all senders together."""
    case = measured.case
    ours, nixl, copy = (measured.gb_s(samples) for samples in (measured.ours, measured.nixl, measured.copy))
    to_nixl, to_copy = measured.ratios(measured.nixl), measured.ratios(measured.copy)
    cpu = {
        name: measured.cpu_s_per_gb([sample.sender_cpu_s + sample.receiver_cpu_s for sample in samples])
        for name, samples in (("ours", measured.ours), ("nixl", measured.nixl), ("copy", measured.copy))
    }
    return {
        "memory": memory,
        "page_bytes": case.page_bytes,
        "pages": case.pages,
        "layout": case.layout,
        "mode": case.mode,
        "senders": case.senders,
        "bytes": case.total_bytes,
        "rounds": len(ours),
        "gb_s": statistics.median(ours),
        "ratio_to_nixl": statistics.median(to_nixl),
        "ratio_to_copy": statistics.median(to_copy),
        "cpu_s_per_gb": cpu["ours"],
        "sender_cpu_s_per_gb": measured.cpu_s_per_gb([sample.sender_cpu_s for sample in measured.ours]),
        "receiver_cpu_s_per_gb": measured.cpu_s_per_gb([sample.receiver_cpu_s for sample in measured.ours]),
        "nixl_gb_s": statistics.median(nixl),
        "nixl_cpu_s_per_gb": cpu["nixl"],
        "copy_gb_s": statistics.median(copy),
        "copy_cpu_s_per_gb": cpu["copy"],
        "by_round": {"ours_gb_s": ours, "nixl_gb_s": nixl, "copy_gb_s": copy, "ratio_to_nixl": to_nixl},
    }


def make_table(report: dict[str, Any]) -> Table:
    rows = report["rows"]
    names = ("page", "pages", "layout", "mode", "senders")
    figures = ("ours", "NIXL", "copy", "ours/NIXL", "ours/copy", "CPU ours", "CPU NIXL", "CPU copy")
    table = Table(
        *names,
        *figures,
        title=f"GB/s and CPU seconds per GB: medians of {report['rounds']} rounds, ratios taken round by round",
        caption="1 GB = 1e9 bytes; CPU of sending and receiving processes together; in brackets the ratios' range",
        names=len(names),
        words=(0, 2, 3),
    )
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["page_bytes"] != row["page_bytes"]:
            table.add_section()
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    ratios = row["by_round"]["ratio_to_nixl"]
    rates = (row["gb_s"], row["nixl_gb_s"], row["copy_gb_s"])
    return [
        size(row["page_bytes"]) + (" VRAM" if row["memory"] == "VRAM" else ""),
        str(row["pages"]),
        row["layout"],
        row["mode"],
        str(row["senders"]),
        *(f"{rate:.2f}" for rate in rates),
        f"{row['ratio_to_nixl']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
        f"{row['ratio_to_copy']:.2f}",
        *(f"{row[name]:.2f}" for name in ("cpu_s_per_gb", "nixl_cpu_s_per_gb", "copy_cpu_s_per_gb")),
    ]


def make_lines(report: dict[str, Any]) -> list[str]:
    """Returns the lines about what is not in the table."""
    machine = report["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    lines = [
        f"machine: {machine['cores']} cores of {machine['cpu']}{gpu}, one thread copies "
        f"{machine['copy_gb_s']:.1f} GB/s; others kept {machine['busy_elsewhere_cores']:.2f} cores busy meanwhile",
        f"NIXL {machine['nixl']}, torch {machine['torch']}, Python {machine['python']}; "
        + " ".join(f"{name}={value}" for name, value in report["ucx"].items()),
    ]
    for memory, measured in ("", report), ("VRAM: ", report.get("vram", {})):
        lines += [memory + line for line in _lines(measured)]
    return lines


def _lines(measured: dict[str, Any]) -> list[str]:
    lines = []
    if latency := measured.get("latency"):
        figures = {
            name: f"{latency[f'{name}_us_median']:.0f} µs (p99 {latency[f'{name}_us_p99']:.0f})"
            for name in ("ours", "nixl", "added", "added_with_reservation")
        }
        lines.append(
            f"one page of {size(latency['page_bytes'])}, {latency['pushes']} times: ours {figures['ours']}, bare NIXL "
            f"{figures['nixl']}, added {figures['added']}; with the reservation {figures['added_with_reservation']}"
        )
    if layers := measured.get("layerwise"):
        lines.append(
            f"{size(layers['bytes'])} over {layers['layers']} layers: {layers['exposed_ms']:.2f} ms after the "
            f"last one ({layers['exposed_layers']:.2f} layers), sent at the end {layers['at_end_ms']:.1f} ms"
        )
    if idle := measured.get("idle"):
        lines.append(
            f"idle with an open session, {idle['seconds']:g} s: sender {idle['sender_percent']:.2f} % of a core, "
            f"receiver {idle['receiver_percent']:.2f} %"
        )
    return lines


def shortfalls(report: dict[str, Any]) -> list[str]:
    """Returns what the transfer promises and this run did not show. On a busy machine that may be the machine's
    doing."""
    rows = [row for row in report["rows"] if row["page_bytes"] >= FROM_PAGE_BYTES]
    slow = sorted((row for row in rows if row["ratio_to_nixl"] < MIN_RATIO_TO_NIXL), key=itemgetter("ratio_to_nixl"))
    found = []
    if slow:
        found.append(
            f"{len(slow)} of {len(rows)} cases with pages of {size(FROM_PAGE_BYTES)} and more are below "
            f"{MIN_RATIO_TO_NIXL} of bare NIXL's GB/s; the lowest is {slow[0]['ratio_to_nixl']:.2f} ({name(slow[0])})"
        )
    for measured in report, report.get("vram", {}):
        found += _shortfalls(measured)
    return found


def _shortfalls(measured: dict[str, Any]) -> list[str]:
    found = []
    latency, layers, idle = (measured.get(part) for part in ("latency", "layerwise", "idle"))
    if latency and latency["added_us_median"] > MAX_ADDED_US:
        added_us = latency["added_us_median"]
        found.append(f"a small push takes {added_us:.0f} µs more than over bare NIXL, not {MAX_ADDED_US:.0f}")
    if layers and layers["exposed_layers"] >= MAX_EXPOSED_LAYERS:
        found.append(f"layer by layer, {layers['exposed_layers']:.2f} layers' time is not hidden")
    for end in ("sender", "receiver"):
        if idle and idle[f"{end}_percent"] >= MAX_IDLE_PERCENT:
            found.append(f"an idle {end} uses {idle[f'{end}_percent']:.2f} % of a core")
    return found


def name(row: dict[str, Any]) -> str:
    how = "layer by layer" if row["mode"] == LAYERS else "whole pages"
    senders = "1 sender" if row["senders"] == 1 else f"{row['senders']} senders"
    return f"{size(row['page_bytes'])} {row['layout']}, {how}, {senders}, {row['memory']}"


def size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
