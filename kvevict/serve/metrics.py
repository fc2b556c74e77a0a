"""The metrics that Prometheus reads at /metrics, and how far requests are."""

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .call import Call
from .prefixes import Prefixes
from .scheduler import Scheduler

OTHER = "other"  # the endpoint of a request to none that there is
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


def progress(call: Call) -> dict[str, Any]:
    call.gather()
    whole, cached, written = call.prompt_tokens, call.cached_tokens, call.new_tokens
    read = max(min(call.read_tokens, whole) - cached, 0)
    return dict(
        id=call.identity, endpoint=call.endpoint, state="running" if call.running else "waiting",
        seconds=round(time.monotonic() - call.began, 3), prompt_tokens=whole, cached_tokens=cached,
        tokens_to_read=max(whole - cached, 0), tokens_read=read, tokens_written=written,
    )  # fmt: skip


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = dict(registry=self.registry)
        self.requests = Counter(
            "kvevict_requests", "Requests that were answered or refused", ["endpoint", "status"], **own
        )
        self.queue = Gauge("kvevict_queue", "Requests that wait for their turn", **own)
        self.running = Gauge("kvevict_running", "Answers that are written", **own)
        self.read = Counter("kvevict_tokens_read", "Prompt tokens that the model read", **own)
        self.saved = Counter("kvevict_tokens_saved", "Prompt tokens that came from stored prefixes", **own)
        self.left = Gauge("kvevict_tokens_to_read", "Prompt tokens that requests have still to read", **own)
        self.written = Counter("kvevict_tokens_written", "Tokens that the model wrote", **own)
        self.cache = Gauge("kvevict_cache_bytes", "Bytes of stored prefixes", ["place"], **own)
        self.first = Histogram(
            "kvevict_first_token_seconds", "From a request to its first token", buckets=SECONDS, **own
        )

    def refused(self, endpoint: str, status: int) -> None:
        """Count a request that was refused before it became a call."""
        self.requests.labels(endpoint, str(status)).inc()

    def note(self, call: Call, status: int) -> None:
        """Count a call that has ended."""
        self.requests.labels(call.endpoint, str(status)).inc()
        self.saved.inc(call.cached_tokens)
        self.read.inc(progress(call)["tokens_read"])
        self.written.inc(call.new_tokens)
        if call.first_token is not None:
            self.first.observe(call.first_token - call.began)

    def text(self, scheduler: Scheduler, prefixes: Prefixes, calls: Iterable[Call]) -> bytes:
        self.queue.set(scheduler.waiting)
        self.running.set(scheduler.running)
        every = [progress(call) for call in calls]
        self.left.set(sum(each["tokens_to_read"] - each["tokens_read"] for each in every))
        self.cache.labels("memory").set(prefixes.live_bytes)
        self.cache.labels("disk").set(prefixes.file_bytes)
        return generate_latest(self.registry)
