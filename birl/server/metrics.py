"""Prometheus metrics of a server: the engine's counters, read at each scrape, and requests."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from birl.engine.engine import EmbeddedEngine

LATENCY = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Metrics with a separate registry, as one process may have several servers."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(engine))  # pyright: ignore[reportArgumentType]  anything with collect()
        own: Any = {"registry": self.registry}
        self.requests = Counter("birl_requests", "Requests that were answered", ["route", "status"], **own)
        self.seconds = Histogram(
            "birl_request_seconds", "From request to end of answer", ["route"], buckets=LATENCY, **own
        )
        self.loads = Counter("birl_loads", "Weights that were taken", **own)
        self.load_failures = Counter("birl_load_failures", "Weights that were refused", ["cause"], **own)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        counters, scheduler = self.engine.counters, self.engine.scheduler
        pages = scheduler.pages
        for name, told, value in (
            ("tokens_sampled", "Tokens sampled", counters.tokens),
            ("tokens_scored", "Given tokens that got their log-prob", counters.scored),
            ("tokens_prefilled", "Prompt tokens computed", counters.prefilled),
            ("tokens_reused", "Tokens of prompts that were not computed, as their pages were there", counters.reused),
            ("tokens_dropped", "Tokens sampled for requests that were cancelled", counters.dropped),
            ("sequences_finished", "Sequences that ended", counters.finished),
            ("compute_seconds", "Time spent computing", counters.seconds),
            ("preempted", "Sequences that lost their keys and values for want of pages", scheduler.preempted),
        ):
            yield CounterMetricFamily(f"birl_{name}", told, value)
        for name, told, value in (
            ("sequences_running", "Sequences being decoded", len(scheduler.running)),
            ("sequences_waiting", "Sequences that wait for their turn", len(scheduler.waiting)),
            ("kv_pages_used", "Pages of the KV cache in use", pages.total - pages.room),
            ("kv_pages_known", "Pages of the KV cache that are looked up by their tokens", len(pages.known)),
            ("kv_pages_total", "Pages of the KV cache", pages.total),
            ("weight_version", "Version of the weights", self.engine.version),
        ):
            yield GaugeMetricFamily(f"birl_{name}", told, value)
