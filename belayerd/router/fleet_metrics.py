"""``belayer_fleet_*`` on the router's /metrics: read from the fleet when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from belayer.messages.fleet import FleetStatusReply


class FleetMetrics(Collector):
    def __init__(self, status: Callable[[], FleetStatusReply]) -> None:
        self._status = status
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        said = self._status()
        up = GaugeMetricFamily("belayer_fleet_peer_up", "1 while a peer may be given requests", labels=["peer"])
        answer = GaugeMetricFamily("belayer_fleet_answer_seconds", "Of a peer's last answer", labels=["peer"])
        forwarded = GaugeMetricFamily("belayer_fleet_forwarded", "Our requests on a peer", labels=["peer"])
        for peer in said.peers:
            up.add_metric([peer.host], float(peer.state == "up"))
            forwarded.add_metric([peer.host], peer.forwarded)
            if peer.answer_ms >= 0:
                answer.add_metric([peer.host], peer.answer_ms / 1e3)
        serving = GaugeMetricFamily("belayer_fleet_serving", "Requests of a peer that run here", labels=["peer"])
        for host, count in said.serving.items():
            serving.add_metric([host], count)
        dropped = CounterMetricFamily("belayer_fleet_dropped", "Not let in at the fleet's port", labels=["reason"])
        for reason, count in said.dropped.items():
            dropped.add_metric([reason], count)
        yield from (up, answer, forwarded, serving, dropped)

    def close(self) -> None:
        REGISTRY.unregister(self)
