"""Tables for people. Pure: messages in, rich renderables out."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from belayer.messages.control import HostStatusReply, Incident, SlotView
from belayer.messages.router import FrontDeath, RouterFront, RouterStatusReply
from belayer.messages.sandbox import Birth, Lineages, SandboxList
from belayerctl import accounting

_COLOURS = {
    "protected": "green",
    "rearming": "yellow",
    "exposed": "yellow",
    "quarantined": "red",
    "reserve": "cyan",
    "empty": "red",
    "stopped": "red",
    "given up": "red",
    "away": "red",
}


def state(text: str) -> Text:
    return Text(text, style=_COLOURS.get(text, "cyan"))


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def table(title: str, *columns: str) -> Table:
    """Names and numbers are never torn: only the last column, which holds the prose, may fold."""
    out = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        out.add_column(column, overflow="fold", no_wrap=column != columns[-1])
    return out


def health(status: HostStatusReply) -> str:
    """``healthy``, or what is not."""
    if status.healthy:
        return "healthy"
    missing = {"weights", "kv"} - {owner.kind for owner in status.owners}
    why = [f"gpuowner@{kind} does not answer" for kind in sorted(missing)]
    why += [] if status.router else ["belayer-router does not answer"]
    why += [f"front {row.front} of the router is {row.state}" for row in status.fronts if row.state != "serving"]
    why += ["no zygote"] if status.zygote_failed else []
    why += [f"{slot.slot} is not protected" for slot in status.slots if not slot.protected and slot.state != "reserve"]
    return "NOT healthy: " + ", ".join(why or ["no slots"])


def slots(status: HostStatusReply) -> Group:
    """Slots, their workers, and why a slot is as it is: three parts, so that each fits on 80 columns."""
    out = table(
        f"{status.host}: {health(status)}, router {status.router_url}",
        *("slot", "state", "gen", "protected", "handovers", "re-arm", "model, weights"),
    )
    for slot in status.slots:
        out.add_row(
            slot.slot,
            state(slot.state),
            str(slot.generation),
            "yes" if slot.protected else "no",
            str(slot.handovers),
            f"{slot.rearm_ms / 1000:.2f} s" if slot.rearm_ms else "-",
            f"{slot.model} v{slot.weight_version}",
        )
    reasons = [
        Text(f"{slot.slot}: {slot.reason}{_way_out(slot)}", style="yellow") for slot in status.slots if slot.reason
    ]
    if status.zygote_failed:
        reasons.append(Text(status.zygote, style="red"))
    return Group(out, *reasons, workers(status))


def _way_out(slot: SlotView) -> str:
    """Where only an operator can help, the words say how."""
    waits = slot.state in ("quarantined", "empty")
    return f"; once that is mended: belayerctl restore {slot.slot}" if waits else ""


def workers(status: HostStatusReply) -> Table:
    out = table("workers", "slot", "role", "pid", "phase", "beat ms", "MiB")
    for slot in status.slots:
        for worker in slot.workers:
            stopped = " STOPPED" if worker.state in ("T", "t") else ""
            phase = f"{worker.phase or 'starting'}{stopped}"
            row = (slot.slot, worker.role, str(worker.pid), phase, f"{worker.age_ms:.0f}", f"{worker.rss_mb:.0f}")
            out.add_row(*row)
            for rank in worker.ranks:
                stopped = " STOPPED" if rank.state in ("T", "t") else ""
                out.add_row("", "", str(rank.pid), f"rank {rank.rank}{stopped}", "", f"{rank.rss_mb:.0f}")
    return out


def owners(status: HostStatusReply) -> Group:
    """Each owner, what it holds for whom, what its workers cost beside it, and what was lost: parts of 80 columns."""
    head = table("owners", "kind", "pid", "gen", "clients", "a kill of it is outlived by")
    said = []
    for owner in status.owners:
        kind = owner.kind if owner.backend == "memfd" else f"{owner.kind} ({owner.backend})"
        row = (kind, str(owner.pid), str(owner.owner_generation), str(owner.connections))
        head.add_row(*row, owner.store or f"nothing: {owner.store_reason}")
        said += [Text(f"lost: {sentence}", style="red") for sentence in owner.lost]
    allocations = table("memory", "what", "state", "at", "MiB there", "for")
    for held in accounting.held(status):
        name = f"{held.name}/{held.rank}" if held.rank else held.name
        there = f"{held.resident / 2**20:.0f}/{held.nbytes / 2**20:.0f}"
        there += f"+{held.staging / 2**20:.0f}" if held.staging else ""
        people = ", ".join(held.holders) if held.kind == "kv" else f"{len(held.holders)} readers"
        allocations.add_row(name, state(held.state), held.count, there, people or "-")
        said += [Text(f"{old} of {name} is an old version", style="yellow") for old in held.old]
    return Group(head, allocations, *said, footprints(status))


def footprints(status: HostStatusReply) -> Group:
    """What the kernel says of each worker's memory (smaps_rollup), in MiB, and what follows from it for a shadow."""
    out = table("their memory, MiB", "slot", "role", "mapped", "fair share", "its own", "worker")
    for slot in status.slots:
        for worker in slot.workers:
            mib = [f"{value:.0f}" if value else "-" for value in (worker.mapped_mb, worker.pss_mb, worker.private_mb)]
            out.add_row(slot.slot, worker.role, *mib, worker.worker_id)
    costs = []
    for cost in accounting.shadow_costs(status):
        second = f"a second full engine would cost {cost.second_engine:.0f}"
        costs.append(Text(f"{cost.slot}: its shadow costs {cost.shadow:.0f} MiB; {second}"))
    for slot in status.slots:
        if any(not worker.mapped_mb for worker in accounting.shadows(slot)):
            costs.append(Text(f"{slot.slot}: its shadow was not looked at yet", style="yellow"))
    return Group(out, *costs)


def incident(row: Incident) -> Table:
    head = f"{row.incident_id} {row.slot} {when(row.at)} {row.cause}: {row.detail}"
    out = table(head, "step", "ms", "seen")
    for step in row.steps:
        out.add_row(step.step, f"{step.ms:.1f}", step.detail)
    injected = " (injected)" if row.injected else ""
    moved = f"generation {row.from_generation} -> {row.to_generation}"
    out.add_row("total", f"{row.total_ms:.1f}", f"{row.outcome}, {moved}{injected}")
    return out


def incidents(rows: tuple[Incident, ...]) -> Group:
    """The facts in a table, the words below it: in a last column of 80 they would be a letter wide."""
    out = table("incidents", "time", "id", "slot", "gen", "ms", "outcome")
    said = []
    for row in rows:
        moved = f"{row.from_generation}->{row.to_generation}"
        short, _, more = row.outcome.partition(": ")
        out.add_row(when(row.at), row.incident_id, row.slot, moved, f"{row.total_ms:.0f}", short)
        words = [row.cause, row.detail, more if more not in row.detail else ""]
        injected = " (injected)" if row.injected else ""
        said.append(Text(f"{when(row.at)} {row.slot}: {': '.join(filter(None, words))}{injected}"))
    return Group(out, *said)


def router(status: RouterStatusReply) -> Group:
    parts: list[RenderableType] = [_router(status)]
    return Group(*parts, *([fronts(status.fronts)] if status.fronts else []))


def fronts(rows: tuple[RouterFront, ...]) -> Group:
    """Where the router has several; the words of each one's last death below, since a column would tear them."""
    out = table("fronts", "front", "pid", "state", "alive since", "streams", "requests", "restarts", "unread KiB")
    said = []
    for row in rows:
        since = f"{datetime.fromtimestamp(row.since, UTC):%m-%d %H:%M:%S}" if row.pid else "-"
        counts = (str(row.streams), str(row.requests_total), str(row.restarts), f"{row.unread / 1024:.0f}")
        out.add_row(str(row.front), str(row.pid or "-"), state(row.state), since, *counts)
        if row.deaths:
            said.append(Text(f"front {row.front}: {_last(row.deaths[-1])}", style="yellow"))
    return Group(out, *said)


def _last(death: FrontDeath) -> str:
    back = f"served again after {death.served_ms:.0f} ms" if death.served_ms >= 0 else "has not served since"
    injected = " (injected)" if death.injected else ""
    return f"last death {when(death.at)}: {death.said()}; {back}{injected}"


def _router(status: RouterStatusReply) -> Table:
    out = table(
        f"router {status.url}: {status.running} running, {status.waiting} waiting, "
        f"{status.finished_total} finished, {status.failed_total} failed, {status.resumed_total} resumed",
        *("slot", "gen", "registered", "running", "waiting", "tokens", "resumed", "late dropped"),
    )
    for slot in status.slots:
        out.add_row(
            slot.slot,
            str(slot.generation),
            "yes" if slot.registered else "no",
            str(slot.running),
            str(slot.waiting),
            str(slot.tokens_total),
            str(slot.resumed_total),
            str(slot.late_dropped_total),
        )
    return out


def sandboxes(listed: SandboxList) -> Group:
    out = table("sandboxes", "sandbox", "state", "boundary", "ready", "life", "container", "pid")
    for box in listed.sandboxes:
        ready = str(box.ready_boundary) if box.ready_boundary >= 0 else "-"
        life = box.incarnation.removeprefix(f"{box.sandbox_id}.")
        out.add_row(
            box.sandbox_id, state(box.state), str(box.boundary), ready, life, box.container_id[:12], str(box.pid)
        )
    reasons = [Text(f"{box.sandbox_id}: {box.reason}", style="yellow") for box in listed.sandboxes if box.reason]
    pool = [Text(f"{listed.waiting} more wait in the pool")] if listed.waiting else []
    return Group(out, *reasons, *pool)


def lineages(found: Lineages) -> Group:
    """One tree per sandbox, oldest life first; a fork's begins with the lives of the sandbox that it came from."""
    trees: list[RenderableType] = []
    for name, births in sorted(found.births.items()):
        at = tree = Tree(Text(name, style="bold"))
        for birth in births:
            at = at.add(_birth(birth))
        trees.append(tree)
    return Group(*(trees or [Text("no sandboxes")]))


def _birth(birth: Birth) -> Text:
    text = Text(f"{birth.incarnation} {birth.kind} {when(birth.at)}")
    if birth.checkpoint_id:
        text.append(f" at boundary {birth.boundary} from {birth.checkpoint_id}")
    if birth.kind in ("rewound", "restored", "base") and birth.left_boundary > birth.boundary:
        text.append(f", gave up boundaries to {birth.left_boundary}", style="yellow")
    if birth.note:
        text.append(f"\n{birth.note}", style="italic")
    return text


def slot_line(slot: SlotView) -> str:
    return f"{slot.slot}: {slot.state}, generation {slot.generation}, protected {'yes' if slot.protected else 'no'}"


def live(
    status: HostStatusReply | None,
    router_status: RouterStatusReply | None,
    boxes: SandboxList | None,
    rows: tuple[Incident, ...],
    rates: dict[str, float],
) -> RenderableType:
    """The whole of ``belayerctl top``; what does not answer is said, not hidden."""
    parts: list[RenderableType] = []
    if status is None:
        parts.append(Text("belayerd does not answer", style="red"))
    else:
        parts += [slots(status), owners(status)]
    if router_status is None:
        parts.append(Text("belayer-router does not answer", style="red"))
    else:
        parts.append(router(router_status))
        parts.append(Text("  ".join(f"{slot} {rate:.0f} tok/s" for slot, rate in rates.items()), style="bold"))
    parts.append(sandboxes(boxes) if boxes else Text("envkeeper does not answer", style="yellow"))
    parts.append(incidents(rows[:8]))
    return Group(*parts)
