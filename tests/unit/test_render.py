"""What ``belayerctl`` shows can be read on a terminal of 80 columns: no name, number or reason is torn apart."""

from __future__ import annotations

import msgspec
from rich.console import Console, RenderableType

from belayer.messages import control, router, sandbox
from belayer.messages import fleet as fleet_messages
from belayerctl import fleet, render

LONG = "kernel refused the fence: process 4242 of the old tree is in state D since 12 s"


def shown(what: RenderableType) -> list[str]:
    console = Console(width=80, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text().splitlines()


def cells_are_whole(lines: list[str], *cells: str) -> None:
    assert max(map(len, lines)) <= 80
    for cell in cells:
        assert any(cell in line for line in lines), f"{cell!r} is torn in:\n" + "\n".join(lines)


def host(**changes: object) -> control.HostStatusReply:
    main = control.WorkerView(
        worker_id="rollout-0-1a2b3c4d", pid=123456, role="main", state="T", age_ms=1200.0, phase="step", rss_mb=18432
    )
    slot = control.SlotView(
        slot="rollout-0",
        state="quarantined",
        generation=128,
        protected=False,
        model="qwen3-8b-instruct",
        device="cpu",
        weight_version=4096,
        workers=(main,),
        handovers=127,
        reason=LONG,
        rearm_ms=3900.0,
    )
    return control.HostStatusReply(
        host="node-17", pid=1, instance="i", at=0.0, slots=(slot,), router="up", router_url="http://10.0.0.17:8000"
    )


def test_a_slot_that_waits_for_an_operator_says_for_what() -> None:
    assert "belayerctl restore rollout-0" in " ".join(shown(render.slots(host())))
    serving = msgspec.structs.replace(host().slots[0], state="protected")
    calm = msgspec.structs.replace(host(), slots=(serving,))
    assert "belayerctl restore" not in " ".join(shown(render.slots(calm)))


def test_slots_fit_and_say_why() -> None:
    lines = shown(render.slots(host()))
    cells_are_whole(
        lines,
        "rollout-0",
        "quarantined",
        "128",
        "qwen3-8b-instruct",
        "v4096",
        "3.90 s",
        "123456",
        "step STOPPED",
        "18432",
    )
    assert LONG.split()[-1] in " ".join(lines), "the reason is shown to its end"


def test_sandboxes_fit() -> None:
    box = sandbox.SandboxInfo(
        sandbox_id="django-11099-attempt-3",
        state="lost",
        incarnation="django-11099-attempt-3.12",
        container_id="0123456789abcdef" * 4,
        boundary=117,
        ready_boundary=115,
        pid=987654,
        reason=LONG,
    )
    lines = shown(render.sandboxes(sandbox.SandboxList(sandboxes=(box,))))
    cells_are_whole(lines, "django-11099-attempt-3", "lost", "117", "115", "12", "0123456789ab", "987654")


def test_incidents_and_router_fit() -> None:
    row = control.Incident(
        incident_id="inc-7f3a9c21",
        slot="rollout-0",
        at=0.0,
        cause="hang",
        detail=LONG,
        from_generation=127,
        to_generation=128,
        outcome="resumed",
        total_ms=1183.0,
    )
    gave_up = msgspec.structs.replace(row, outcome=f"quarantined: {LONG} again", cause="death")
    lines = shown(render.incidents((row, gave_up)))
    cells_are_whole(lines, "inc-7f3a9c21", "rollout-0", "127->128", "1183", "resumed", "quarantined", "00:00:00")
    words = " ".join(line.strip() for line in lines)
    assert f"rollout-0: hang: {LONG}" in words, "read from left to right, not in a column of letters"
    assert f"rollout-0: death: {LONG}: {LONG} again" in words
    seat = router.RouterSlot(slot="rollout-0", generation=128, registered=True, running=256, tokens_total=123456789)
    reply = router.RouterStatusReply(
        instance="i", pid=1, url="http://10.0.0.17:8000", slots=(seat,), running=256, waiting=0
    )
    cells_are_whole(shown(render.router(reply)), "rollout-0", "128", "256", "123456789")


def test_fronts_fit_and_one_that_does_not_serve_is_named() -> None:
    death = router.FrontDeath(
        life="0.1a2b3c4d", number=41, pid=123456, at=0.0, cause="given up", why=f"killed by the router: {LONG}",
        lived_s=86400.0, requests=128, ended=127, let_go_ms=1.0, forked_ms=10_200.0, served_ms=11_400.0, injected=True,
    )  # fmt: skip
    rows = (
        router.RouterFront(
            front=0, state="serving", pid=123457, since=0.0, streams=256, requests_total=1234567, unread=268435456,
            restarts=41, deaths=(death,),
        ),
        router.RouterFront(front=63, state="given up", pid=123458, since=0.0),
        router.RouterFront(front=62, state="away", since=0.0),
    )  # fmt: skip
    lines = shown(render.fronts(rows))
    cells_are_whole(lines, "123457", "serving", "01-01 00:00:00", "256", "1234567", "41", "262144", "given up", "away")
    words = " ".join(line.strip() for line in lines)
    assert f"front 0: last death 00:00:00: killed by the router: {LONG}; it lived 86400.0 s" in words
    assert "1 went on by their ids, 127 ended; served again after 11400 ms (injected)" in words
    status = msgspec.structs.replace(host(), fronts=rows)
    assert "front 63 of the router is given up, front 62 of the router is away" in render.health(status)
    assert "front 0" not in render.health(status)


def test_a_fleet_with_long_names_and_long_reasons() -> None:
    slot = fleet_messages.RemoteSlot(
        slot="slot0", generation=3, state="serving", model="m", fingerprint="f", weight_version="4096",
        weights_digest="3fa1bc77de01", load=63, capacity=64,
    )  # fmt: skip
    other = msgspec.structs.replace(slot, slot="slot1", weights_digest="99ff00aa1122")
    nowhere = "its name host-c.example does not resolve: Name or service not known"
    bytes_ = "weights 4096 of other bytes (digest 99ff00aa1122; slot0: 3fa1bc77de01)"
    peers = (
        fleet_messages.PeerView(
            host="rack1-host-b", address="10.0.0.2:7300", state="up", answer_ms=1.2, forwarded=4, slots=(slot, other),
            unused={"slot1": bytes_},
        ),
        fleet_messages.PeerView(host="rack1-host-c", address="host-c.example:7300", state="silent", why=nowhere),
    )  # fmt: skip
    said = fleet_messages.FleetStatusReply(
        host="rack1-host-a", listen="10.0.0.1:7300", own=(slot,), peers=peers, serving={"rack1-host-b": 2}
    )
    cells_are_whole(shown(fleet.peers(said)), "rack1-host-b", "10.0.0.2:7300", "silent", "theirs here")
    cells_are_whole(shown(fleet.slots(said)), "rack1-host-b/slot1", "serving", "99ff00aa", "63/64", "no", "here")
    assert fleet.reasons(said) == [f"rack1-host-c: {nowhere}", f"rack1-host-b/slot1 gets nothing new: {bytes_}"]
