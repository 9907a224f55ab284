"""``belayer_*`` on the router's /metrics, beside vLLM's own: read from the core when scraped, kept nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from belayerd.router.core import Core
from belayerd.router.journal import Journal
from belayerd.router.records import SlotState

_TOTALS = {
    "added": ("belayer_requests", "Requests given to the router, one per choice (n)"),
    "finished": ("belayer_requests_finished", "Requests that a worker finished"),
    "aborted": ("belayer_requests_aborted", "Requests whose client left or whose stop string was met"),
    "tokens": ("belayer_tokens", "Tokens received from current workers"),
    "resumed": ("belayer_requests_resumed", "Requests given again to a worker, with their tokens"),
    "restarted": ("belayer_requests_restarted", "Requests given again from the start"),
    "moved": ("belayer_requests_moved", "Requests given again to another slot than their own"),
    "late_messages": ("belayer_late_messages", "Messages of replaced workers that were dropped"),
    "late_items": ("belayer_late_items", "Outputs of requests that had already ended"),
    "torn_links": ("belayer_torn_links", "Links made anew: a message missing, doubled or unreadable, or no answer"),
    "silent": ("belayer_requests_stalled", "Requests taken from a worker that said nothing about them"),
    "cut": ("belayer_requests_cut", "Requests ended with what they had, as they wished, when their worker died"),
    "forwarded": ("belayer_requests_forwarded", "Requests given to another host"),
    "handed_back": ("belayer_requests_handed_back", "Requests that another host gave back"),
    "replayed": ("belayer_requests_replayed", "Repeated ids of ended requests answered from the journal"),
    "attached": ("belayer_requests_attached", "Repeated ids of running requests that took up their stream"),
    "recovered": ("belayer_requests_recovered", "Requests of an earlier life of the router that went on"),
}


class Metrics(Collector):
    """A collector in prometheus-client's default registry, which vLLM's /metrics serves."""

    def __init__(self, core: Core, book: Journal, declined: Counter[str], mistakes: Counter[int]) -> None:
        self._core, self._book, self._declined, self._mistakes = core, book, declined, mistakes
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        counters = self._core.counters
        for name, (metric, text) in _TOTALS.items():
            yield CounterMetricFamily(metric, text, value=getattr(counters, name))
        failed = CounterMetricFamily("belayer_requests_failed", "Requests ended by a typed error", labels=["code"])
        for code, count in counters.failed.items():
            failed.add_metric([code], count)
        yield failed
        yield from self._clients()
        yield GaugeMetricFamily("belayer_requests_waiting", "Requests without a worker", value=self._core.waiting)
        yield CounterMetricFamily("belayer_journal_bytes", "Bytes journaled", value=self._book.bytes_total)
        yield CounterMetricFamily("belayer_journal_failures", "Journal writes that failed", value=self._book.failures)
        yield from self._slots()

    def _clients(self) -> Iterator[Metric]:
        """What clients did wrong, apart from what failed."""
        mistakes = CounterMetricFamily("belayer_client_mistakes", "Answers 4xx", labels=["status"])
        for status, count in self._mistakes.items():
            mistakes.add_metric([str(status)], count)
        declined = CounterMetricFamily(
            "belayer_requests_declined", "Not let in, or cut off, by reason", labels=["reason"]
        )
        # The guard and the core may refuse for the same reason: one row, or no scraper takes the page.
        for reason, count in (self._declined + Counter(self._core.counters.refused)).items():
            declined.add_metric([reason], count)
        yield from (mistakes, declined)
        kept = self._core.archive
        yield GaugeMetricFamily("belayer_requests_kept", "Ended requests that can be asked for", value=len(kept))
        yield GaugeMetricFamily("belayer_kept_bytes", "Memory of these, about", value=kept.bytes)
        yield CounterMetricFamily("belayer_journal_syncs", "Waits for the disk", value=self._book.syncs)

    def _slots(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("belayer_slot_up", "1 while a worker of the slot serves", labels=["slot"])
        generation = GaugeMetricFamily("belayer_slot_generation", "Generation of the slot", labels=["slot"])
        running = GaugeMetricFamily("belayer_slot_running", "Requests on the slot", labels=["slot"])
        tokens = CounterMetricFamily("belayer_slot_tokens", "Tokens from the slot", labels=["slot"])
        first = GaugeMetricFamily(
            "belayer_resume_first_token_seconds",
            "From the last registration to the first token of a resumed request",
            labels=["slot"],
        )
        for slot in self._core.slots.values():
            up.add_metric([slot.name], float(slot.state is SlotState.SERVING))
            generation.add_metric([slot.name], slot.generation)
            running.add_metric([slot.name], len(slot.running))
            tokens.add_metric([slot.name], slot.tokens_total)
            note = slot.last_resume
            if note is not None and note.first_token_ms is not None:
                first.add_metric([slot.name], note.first_token_ms / 1e3)
        yield from (up, generation, running, tokens, first)

    def close(self) -> None:
        REGISTRY.unregister(self)
