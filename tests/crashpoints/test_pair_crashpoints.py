"""belayerd killed after every single effect of a start, a handover and a quarantine, then started again (O1).

The world outside stays as the effects left it; only the saved state is reloaded. The invariants of World.check hold
at every point, and the slot ends where the uninterrupted run ends.
"""

from __future__ import annotations

import pytest

from belayerd import pair as p
from tests.support.pairs import Stopped, World, protected


def _start() -> World:
    return World()


def _kill_main(world: World) -> None:
    assert world.pair.main is not None
    world.lose(world.pair.main.worker_id)


def _crash_and_recover(world: World, stop_after: int, first: p.Event | None) -> bool:
    """False once the run is over before the crash point: all points have been seen."""
    world.performed, world.stop_after = 0, stop_after
    try:
        if first is not None:
            world.send(first)
        world.drain()
    except Stopped:
        world.restart()
        world.drain()
        return True
    return False


def test_start_survives_a_crash_after_every_effect() -> None:
    points = 0
    for stop_after in range(500):
        world = _start()
        if not _crash_and_recover(world, stop_after, p.Wanted()):
            break
        points += 1
        assert world.pair.protected
        assert world.routed == world.holder
    assert points > 15


def test_handover_survives_a_crash_after_every_effect() -> None:
    points = 0
    for stop_after in range(500):
        world = protected()
        _kill_main(world)
        if not _crash_and_recover(world, stop_after, None):
            break
        points += 1
        assert world.pair.protected, f"crash point {stop_after}"
        assert world.pair.main is not None
        assert world.routed == world.holder == world.pair.main.worker_id
        assert world.pair.generation >= 2
    assert points > 15


@pytest.mark.parametrize("then", ["main", "shadow"])
def test_a_worker_dying_while_belayerd_is_down(then: str) -> None:
    for stop_after in range(60):
        world = protected()
        _kill_main(world)
        world.stop_after = world.performed + stop_after
        try:
            world.drain()
        except Stopped:
            saved = world.saved
            assert saved is not None
            victim = saved.main if then == "main" else saved.shadow
            if victim is not None:
                world.die(victim.worker_id)
            world.restart()
            world.drain()
        assert world.pair.protected or world.pair.state is p.State.QUARANTINED


def test_quarantine_is_completed_after_a_crash() -> None:
    points = 0
    for stop_after in range(200):
        world = protected()
        _kill_main(world)
        world.drain()
        _kill_main(world)
        if not _crash_and_recover(world, stop_after, None):
            break
        points += 1
        assert world.pair.state is p.State.QUARANTINED
        assert world.quarantined
        assert world.routed is None
        assert world.alive == set()
    assert points > 4


def test_a_quarantine_is_told_before_any_peer_is_asked() -> None:
    """Peers may take half a minute; a belayerd that is killed meanwhile does the rest in its next life, and alerts
    nobody then."""
    cut = 0
    for stop_after in range(200):
        world = protected()
        _kill_main(world)
        world.drain()
        _kill_main(world)
        world.performed, world.stop_after = 0, stop_after
        try:
            world.drain()
        except Stopped:
            begun = world.routed is None or world.quarantined
            told = bool(world.alerts) and world.outcomes[-1].startswith("quarantined")
            assert told or not begun
            cut += begun
            continue
        break
    assert cut > 2
