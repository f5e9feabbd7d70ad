"""Metrics for Prometheus, at /metrics."""

from collections.abc import Iterator

from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.process_collector import ProcessCollector

from .worker import Job, Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_GAUGES = {
    "waiting": "Requests of the engine that wait for a row or for pages",
    "running": "Requests of the engine that have a row",
    "pages": "Pages of the cache, per layer",
    "free_pages": "Pages that neither a request nor the prefix cache holds",
    "cached_pages": "Pages that the prefix cache holds",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Of these, found in the cache",
    "generated_tokens": "Tokens of answers",
    "preemptions": "Requests that were sent back for want of pages",
    "steps": "Steps of the engine",
    "compile_seconds": "Seconds spent compiling",
}


class Metrics:
    """Counts HTTP requests, and asks the engine for its figures when read."""

    def __init__(self, worker: Worker):
        self._registry = CollectorRegistry()
        self._registry.register(_OfEngine(worker))
        ProcessCollector(registry=self._registry)
        options = {"registry": self._registry, "namespace": "pallas_attn"}
        self._requests = Counter(
            "http_requests", "Requests by HTTP that were answered", ("path", "status"), **options
        )
        self._first = Histogram(
            "time_to_first_token_seconds", "From a request to its first token", buckets=_SECONDS, **options
        )
        self._whole = Histogram(
            "answer_seconds", "From a request to the end of its answer", buckets=_SECONDS, **options
        )

    def answered(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def ended(self, job: Job) -> None:
        if job.first is not None:
            self._first.observe(job.first - job.submitted)
        if job.ended is not None and job.finish_reason in ("stop", "length"):
            self._whole.observe(job.ended - job.submitted)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _OfEngine:
    def __init__(self, worker: Worker):
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.engine.stats()
        for name, help_ in _GAUGES.items():
            yield GaugeMetricFamily(f"pallas_attn_{name}", help_, value=getattr(stats, name))
        for name, help_ in _COUNTERS.items():
            yield CounterMetricFamily(f"pallas_attn_{name}", help_, value=getattr(stats, name))
        finished = CounterMetricFamily(
            "pallas_attn_finished", "Requests of the engine by how they ended", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        yield GaugeMetricFamily(
            "pallas_attn_failing", "1 after a step that failed", value=self._worker.failing
        )
