"""The connector's names in vLLM's own ``/metrics``, and its line in vLLM's log. See docs/engines.md."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from transfer.connectors.vllm.transfer_statistics import LOAD_FAILURES, PAGES, PUSH_FAILURES, TransferStatistics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PdproxyStats(KVConnectorStats):  # type: ignore[misc]
    """`PdproxyStats` carries `TransferStatistics` between vLLM's processes: `data` is what they are `as_data`."""

    @classmethod
    def of(cls, statistics: TransferStatistics) -> PdproxyStats:
        return cls(data=statistics.as_data())

    @property
    def statistics(self) -> TransferStatistics:
        return TransferStatistics.of(self.data) if self.data else TransferStatistics()

    def reset(self) -> None:
        self.data = TransferStatistics().as_data()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        both = self.statistics
        both.add(other.statistics)
        self.data = both.as_data()
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.statistics.summary()

    def is_empty(self) -> bool:
        return not self.statistics.has_events


class PdproxyMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`PdproxyMetrics` are the metrics, in the process that serves ``/metrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._pushes = self._counter("pushes", "Prompts whose KV was sent to a decoder.")
        self._loads = self._counter("loads", "Prompts whose KV was read out of the PD buffer.")
        self._sent_bytes = self._counter("sent_bytes", "Bytes of KV that were sent, by all ranks.")
        self._present_blocks = self._counter("present_blocks", "Blocks that were not sent: the decoder had them.")
        self._page_wait = self._histogram("page_wait_seconds", "Time from asking for a decoder's pages to their grant.")
        self._send_tail = self._histogram("send_tail_seconds", "Time from a prompt's last layer to its last write.")
        failed = self._counter_cls, "Prompts whose KV was not sent, by reason."
        self._failed_pushes = self._by("failed_pushes", *failed, label="reason", values=PUSH_FAILURES)
        failed = self._counter_cls, "Prompts whose KV was not read, by reason."
        self._failed_loads = self._by("failed_loads", *failed, label="reason", values=LOAD_FAILURES)
        text = "Pages of the PD buffer by state, as they were at vLLM's last step."
        options = {"multiprocess_mode": "mostrecent"}
        self._pages = self._by("pages", self._gauge_cls, text, label="state", values=PAGES, **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        seen = TransferStatistics.of(transfer_stats_data)
        self._pushes[engine_idx].inc(seen.num_pushes)
        self._loads[engine_idx].inc(seen.num_loads)
        self._sent_bytes[engine_idx].inc(seen.sent_bytes)
        self._present_blocks[engine_idx].inc(seen.present_blocks)
        for seconds in seen.page_waits_s:
            self._page_wait[engine_idx].observe(seconds)
        for seconds in seen.send_tails_s:
            self._send_tail[engine_idx].observe(seconds)
        for reason, count in seen.failed_pushes.items():
            self._failed_pushes[reason][engine_idx].inc(count)
        for reason, count in seen.failed_loads.items():
            self._failed_loads[reason][engine_idx].inc(count)
        for state, count in seen.pages.items():
            self._pages[state][engine_idx].set(count)

    def _counter(self, name: str, text: str) -> dict[int, Any]:
        return self._per_engine(self._counter_cls(f"vllm:pdproxy_{name}", text, labelnames=self._labelnames))

    def _histogram(self, name: str, text: str) -> dict[int, Any]:
        made = self._histogram_cls(f"vllm:pdproxy_{name}", text, buckets=_SECONDS, labelnames=self._labelnames)
        return self._per_engine(made)

    def _by(
        self, name: str, kind: Any, text: str, *, label: str, values: tuple[str, ...], **options: Any
    ) -> dict[str, dict[int, Any]]:
        """Returns a metric with one label more, by that label's values."""
        made = kind(f"vllm:pdproxy_{name}", text, labelnames=[*self._labelnames, label], **options)
        return {value: self._per_engine(made, value) for value in values}

    def _per_engine(self, metric: Any, *more: str) -> dict[int, Any]:
        return {index: metric.labels(*values, *more) for index, values in self.per_engine_labelvalues.items()}
