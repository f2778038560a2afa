"""Processes that share their metrics as several API servers of one vLLM do, by prometheus_client's multiprocess mode.

usage: python -m tests.helpers.api_servers (with PROMETHEUS_MULTIPROC_DIR set)

Each line that it reads is a number of prompt tokens, for which it counts a request; it answers with the metrics page of
all such processes, as a line of JSON. The metrics are defined as in vLLM 0.32, `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

import json
import sys

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, multiprocess

LABELS = ["model_name", "engine"]


def main() -> None:
    prompt, generation = (Counter(f"vllm:{what}_tokens", what, LABELS) for what in ("prompt", "generation"))
    info = {"block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "65", "engine": "0"}
    config = Gauge("vllm:cache_config_info", "config", list(info), multiprocess_mode="mostrecent")
    usage = Gauge("vllm:kv_cache_usage_perc", "usage", LABELS, multiprocess_mode="mostrecent")
    config.labels(**info).set(1)
    counters = [one.labels("tiny", "0") for one in (prompt, generation)]
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    for line in sys.stdin:
        if num_tokens := int(line):
            usage.labels("tiny", "0").set(0.25)
            for counter, count in zip(counters, (num_tokens, 1), strict=True):
                counter.inc(count)
        print(json.dumps(generate_latest(registry).decode()), flush=True)


if __name__ == "__main__":
    main()
