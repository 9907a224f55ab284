"""What a router tells of its fronts, and what belayerd makes of their deaths: incidents, an alert when they repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer.messages.router import FrontDeath, RouterFront, RouterStatusReply
from belayerd import front_deaths
from belayerd.records import Records
from belayerd.router.front_lives import KEPT, LetGo, Lives

WINDOW_S = 60.0


def test_a_death_is_told_with_what_it_cost_and_how_long_nobody_served() -> None:
    lives = Lives(1)
    lives.begins("1.a", now=10.0, at=1000.0)
    lives.born(77, now=10.1)
    lives.serves(now=11.0)
    assert (lives.view("serving").pid, lives.view("serving").restarts) == (77, 0)
    lives.lost(LetGo(requests=3, ended=2, ms=0.5), now=20.0, at=1010.0)
    lives.lost(LetGo(), now=21.0, at=1011.0)  # told twice: by its pidfd, and by who reaped it
    assert lives.view("away").pid == 0, "the dead one is not shown as one that lives"
    lives.ended("death", "killed", now=20.2, at=1010.2)
    lives.begins("1.b", now=20.4, at=1010.4)
    lives.born(78, now=20.5)
    (death,) = lives.view("starting").deaths
    assert (death.life, death.number, death.pid, death.at, death.lived_s) == ("1.a", 1, 77, 1010.0, 10.0)
    assert (death.requests, death.ended, death.served_ms) == (3, 2, -1.0)
    assert death.forked_ms == pytest.approx(500)
    lives.serves(now=21.5)
    (death,) = lives.view("serving").deaths
    assert death.served_ms == pytest.approx(1500)
    assert lives.view("serving").restarts == 1
    assert death.said() == "killed; it lived 10.0 s and had 3 requests: 1 went on by their ids, 2 ended"


def test_a_life_that_never_served_is_followed_by_the_next_one_that_does() -> None:
    lives = Lives(0)
    for name, now in (("0.a", 0.0), ("0.b", 1.0)):
        lives.begins(name, now, now)
        lives.born(7, now)
        lives.ended("death", "killed", now + 0.5, now + 0.5)
    lives.begins("0.c", 2.0, 2.0)
    lives.serves(4.0)
    assert [death.served_ms for death in lives.deaths] == pytest.approx([3500, 2500])
    lives.begins("0.d", 5.0, 5.0)
    lives.serves(6.0)
    assert [death.served_ms for death in lives.deaths] == pytest.approx([3500, 2500]), "what is told stays told"


def test_the_last_deaths_are_kept_and_one_on_purpose_is_marked_alone() -> None:
    lives = Lives(0)
    for number in range(KEPT + 3):
        lives.begins(str(number), number, number)
        if number == KEPT:
            lives.broken_on_purpose()
        lives.ended("death", "killed", number + 0.5, number + 0.5)
    assert [death.number for death in lives.deaths] == list(range(4, KEPT + 4))
    assert [death.number for death in lives.deaths if death.injected] == [KEPT + 1]


def death(life: str, at: float, served_ms: float = -1.0) -> FrontDeath:
    return FrontDeath(
        life=life, number=1, pid=7, at=at, cause="death", why="killed", lived_s=1.0, requests=2, ended=1, let_go_ms=0.5,
        forked_ms=300.0, served_ms=served_ms,
    )  # fmt: skip


def status(*fronts: tuple[FrontDeath, ...], instance: str = "one") -> RouterStatusReply:
    rows = tuple(RouterFront(front=number, state="serving", deaths=deaths) for number, deaths in enumerate(fronts))
    return RouterStatusReply(instance=instance, pid=1, url="", slots=(), running=0, waiting=0, fronts=rows)


class Log:
    def warning(self, event: str, **fields: Any) -> None: ...

    def error(self, event: str, **fields: Any) -> None: ...


class Watch:
    """One life of belayerd that looks at the router."""

    def __init__(self, folder: Path) -> None:
        self.store = Records(folder / "incidents.db", Log())
        self.alerts: list[tuple[int, str]] = []
        self.look = front_deaths.FrontDeaths(self.store, self.told, WINDOW_S, Log()).look

    def told(self, life: int, reason: str) -> None:
        self.alerts.append((life, reason))

    def outcomes(self) -> dict[str, str]:
        return {row.incident_id: row.outcome for row in self.store.latest()}


def test_a_death_is_written_once_and_its_end_is_added(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look(status((death("0.a", 100.0),), ()))
    assert watch.outcomes() == {"front-0.a": "open"}
    again = Watch(tmp_path)  # another life of belayerd finds the same deaths
    again.look(status((death("0.a", 100.0, 1500.0),), ()))
    assert again.outcomes() == {"front-0.a": "served"}
    (row,) = again.store.latest()
    assert (row.slot, row.cause, row.total_ms) == ("router/front0", "death", 1500.0)
    steps = [("1 let go", 0.5), ("2 forked", 299.5), ("3 serves", 1200.0)]
    assert [(step.step, step.ms) for step in row.steps] == steps
    assert sum(step.ms for step in row.steps) == row.total_ms


def test_the_second_end_within_the_window_is_an_alert_and_the_third_is_not(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    first, second, third = death("0.a", 100.0), death("1.a", 130.0), death("0.b", 131.0)
    watch.look(status((first,), ()))
    assert watch.alerts == []
    watch.look(status((first,), (second,)))
    watch.look(status((first, third), (second,)))
    ((life, said),) = watch.alerts
    assert (life, "front 1 of the router died" in said, "60 s" in said) == (1, True, True)
    Watch(tmp_path).look(status((first, third), (second,)))
    assert len(watch.alerts) == 1
    late = death("0.c", 131.0 + WINDOW_S), death("0.d", 132.0 + WINDOW_S)
    watch.look(status((first, third, late[0]), (second,)))
    assert len(watch.alerts) == 1, "a row of ends was over"
    watch.look(status((first, third, *late), (second,)))
    assert len(watch.alerts) == 2


def test_all_that_is_new_after_an_absence_of_belayerd_is_one_alert(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look(status(tuple(death(f"0.{number}", 100.0 + number) for number in range(5)), ()))
    assert len(watch.outcomes()) == 5
    assert len(watch.alerts) == 1
    again = Watch(tmp_path)
    again.look(status(tuple(death(f"0.{number}", 100.0 + number) for number in range(5)), ()))
    assert again.alerts == [], "told in the life before"


def test_what_was_open_of_an_earlier_router_ends_with_it(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look(status((death("0.a", 100.0),), (death("1.a", 10.0, 20.0),)))
    watch.look(status((), (), instance="two"))
    assert watch.outcomes() == {"front-0.a": "ended with its router", "front-1.a": "served"}


def test_a_disk_that_takes_nothing_costs_the_record_and_not_the_alert(tmp_path: Path) -> None:
    (tmp_path / "incidents.db").mkdir()
    watch = Watch(tmp_path)
    for _ in range(2):
        watch.look(status((death("0.a", 100.0), death("0.b", 101.0)), ()))
    assert len(watch.alerts) == 1


def test_a_status_without_fronts_is_one_of_an_older_router(tmp_path: Path) -> None:
    said = {"instance": "i", "pid": 1, "url": "", "slots": [], "running": 0, "waiting": 0}
    watch = Watch(tmp_path)
    watch.look(msgspec.convert(said | {"type": "RouterStatusReply"}, RouterStatusReply))
    assert watch.outcomes() == {}
