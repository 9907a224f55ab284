"""``belayer_front_*`` on /metrics, where a router has several fronts: read from the door when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from belayerd.router.front_door import FrontDoor
from belayerd.router.fronts import Fronts


class FrontMetrics(Collector):
    def __init__(self, fronts: Fronts, door: FrontDoor) -> None:
        self._fronts, self._door = fronts, door
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("belayer_front_up", "1 while a front answers on the ports", labels=["front", "pid"])
        taken = CounterMetricFamily("belayer_front_requests", "Requests that a front gave", labels=["front", "pid"])
        unread = GaugeMetricFamily("belayer_front_unread_bytes", "Not yet read by a front", labels=["front", "pid"])
        open_ = GaugeMetricFamily("belayer_front_streams", "Requests that a front hears", labels=["front", "pid"])
        since = GaugeMetricFamily(
            "belayer_front_start_time_seconds", "Unix time at which its life began", labels=["front", "pid"]
        )
        streams = self._door.streams()
        for identity, side in self._door.sides.items():
            where = [str(side.number), str(side.pid)]
            up.add_metric(where, float(side.serving and not side.given_up))
            taken.add_metric(where, side.added)
            unread.add_metric(where, side.sent - side.read)
            open_.add_metric(where, streams[identity])
            since.add_metric(where, self._fronts.places[side.number].lives.since)
        deaths = CounterMetricFamily("belayer_front_deaths", "Lives of a front that have ended", labels=["front"])
        given_up = CounterMetricFamily(
            "belayer_front_given_up", "Of these, how many the router ended by name", labels=["front"]
        )
        for place in self._fronts.places:
            deaths.add_metric([str(place.number)], place.deaths)
            given_up.add_metric([str(place.number)], place.given_ups)
        yield from (up, taken, unread, open_, since, deaths, given_up)

    def close(self) -> None:
        REGISTRY.unregister(self)
