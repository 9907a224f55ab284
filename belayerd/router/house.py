"""All of a router that there must be one of, however many fronts it has: core, journal, shell, fleet, heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from belayer.config import Config
from belayer.fleet_keys import Pair
from belayer.messages.fleet import Life
from belayerd.router import journal
from belayerd.router import vllm_seam as seam
from belayerd.router.core import Core, Limits
from belayerd.router.events import OnDeath, SameId
from belayerd.router.fleet import Fleet, fingerprint
from belayerd.router.fleet_metrics import FleetMetrics
from belayerd.router.heart import Ears
from belayerd.router.journal_reader import read
from belayerd.router.local_heart import FRONT, LocalHeart
from belayerd.router.metrics import Metrics
from belayerd.router.preflight import one_model
from belayerd.router.shell import Shell, Sink, to_record


def limits(config: Config) -> Limits:
    router = config.router
    wishes = {slot.name: OnDeath(slot.on_death or router.on_death) for slot in config.slot}
    return Limits(
        deaths=router.deaths_per_request,
        home_s=router.request_deadline_s / 4,
        waiting_s=router.request_deadline_s,
        silence_s=router.silence_s,
        journal_every=router.journal_every,
        keep_bytes=router.keep_finished_mb << 20,
        same_id=SameId(router.same_id),
        on_death=wishes,
        capacity={slot.name: slot.max_num_seqs for slot in config.slot} if config.fleet.listen else {},
        slots=frozenset(slot.name for slot in config.slot),
        peers=bool(config.peer),
    )


class House:
    """Make it inside the running event loop, then ``open``; ``close`` when no front is left."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        instance: str,
        log: Any,
        codec: seam.Codec,
        pair: Pair | None = None,
        life: Life | None = None,
    ) -> None:
        """``folder``: of the journal. ``pair`` and ``life``: with both, this router is one of a fleet."""
        router = config.router
        self.core = Core(limits(config))
        self._earlier = read(folder, named_only=True, keep_bytes=router.keep_finished_mb << 20)
        for damage in self._earlier.damage:
            log.warning("journal_damaged", where=damage)
        book = journal.Journal(folder, instance, router.journal_max_mb << 20, self._live, router.journal_sync)
        self.heart = LocalHeart(codec, [slot.name for slot in config.slot], router.max_requests)
        self.fleet = None
        sink: Sink = self.heart
        if pair is not None and life is not None:
            model = one_model(config)
            mark = fingerprint(model, router, seam.VERSION)
            self.fleet = Fleet(config, pair, life, model, mark, codec, self.heart.is_full, log)
            sink = self.fleet.sink(sink)
        self.shell = Shell(self.core, book, codec, sink, FRONT, log)
        self.shell.link_silence_s = router.link_silence_s
        self.shell.call_s = {slot.name: slot.start_deadline_s for slot in config.slot}  # as its worker announces it
        if self.fleet is not None:
            self.fleet.attach(self.shell)
        self.metrics = Metrics(self.core, book, self.heart.declined, self.heart.mistakes)
        self.fleet_metrics = None if self.fleet is None else FleetMetrics(self.fleet.status)
        self.url = f"http://{router.host}:{router.port}"
        self.slot_urls = {slot.name: f"http://{router.host}:{slot.url_port}" for slot in config.slot if slot.url_port}

    def open(self, ears: Ears) -> None:
        """From here on the front end is told; what an earlier life of the router ran goes on."""
        self.heart.attach(self.shell, ears)
        self.shell.recover(story.past() for story in self._earlier.stories.values())
        del self._earlier

    def _live(self) -> list[journal.Record]:
        return [record for effect in self.core.live_records() if (record := to_record(effect)) is not None]

    def close(self) -> None:
        self.shell.close()
        if self.fleet is not None and self.fleet_metrics is not None:
            self.fleet.close()
            self.fleet_metrics.close()
        self.metrics.close()
