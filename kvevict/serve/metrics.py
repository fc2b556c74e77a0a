"""Keeps the metrics that Prometheus reads at /metrics, and reports the progress of requests."""

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .call import Call
from .errors import Json
from .prefixes import Prefixes
from .scheduler import Scheduler

OTHER = "other"  # the name by which metrics and log record the endpoint of a request to an unknown path
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # upper bounds of the histogram's buckets


def progress(call: Call) -> Json:
    """Return a call's progress as /v1/kvevict/queue reports it."""
    call.gather()
    whole, cached, written = call.prompt_tokens, call.cached_tokens, call.new_tokens
    read = max(min(call.read_tokens, whole) - cached, 0)
    return dict(
        id=call.identity, endpoint=call.endpoint, state="running" if call.running else "waiting",
        seconds=round(time.monotonic() - call.began, 3), prompt_tokens=whole, cached_tokens=cached,
        tokens_to_read=max(whole - cached, 0), tokens_read=read, tokens_written=written,
    )  # fmt: skip


class Metrics:
    """The metrics of one server, in a registry that no other server uses."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def of(kind: Any, name: str, about: str, **more: Any) -> Any:
            return kind(f"kvevict_{name}", about, registry=self.registry, **more)

        self.requests = of(
            Counter, "requests", "Requests that were answered or refused", labelnames=["endpoint", "status"]
        )
        self.queue = of(Gauge, "queue", "Requests that wait for their turn")
        self.running = of(Gauge, "running", "Answers that are written")
        self.read = of(Counter, "tokens_read", "Prompt tokens that the model read")
        self.saved = of(Counter, "tokens_saved", "Prompt tokens that came from stored prefixes")
        self.left = of(Gauge, "tokens_to_read", "Prompt tokens that requests have still to read")
        self.written = of(Counter, "tokens_written", "Tokens that the model wrote")
        self.cache = of(Gauge, "cache_bytes", "Bytes of stored prefixes", labelnames=["place"])
        self.first = of(Histogram, "first_token_seconds", "From a request to its first token", buckets=SECONDS)

    def refused(self, endpoint: str, status: int) -> None:
        """Count a request that was refused before there was a `Call` for it."""
        self.requests.labels(endpoint, str(status)).inc()

    def note(self, call: Call, status: int) -> None:
        """Add a call that has ended to the counters. status: HTTP status of its response."""
        read = progress(call)["tokens_read"]
        self.requests.labels(call.endpoint, str(status)).inc()
        self.saved.inc(call.cached_tokens)
        self.read.inc(read)
        self.written.inc(call.new_tokens)
        if call.first_token is not None:
            self.first.observe(call.first_token - call.began)

    def text(self, scheduler: Scheduler, prefixes: Prefixes, calls: Iterable[Call]) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.queue.set(scheduler.waiting)
        self.running.set(scheduler.running)
        every = [progress(call) for call in calls]
        self.left.set(sum(each["tokens_to_read"] - each["tokens_read"] for each in every))
        self.cache.labels("memory").set(prefixes.live_bytes)
        self.cache.labels("disk").set(prefixes.file_bytes)
        return generate_latest(self.registry)
