"""What belayerd writes, and what dead workers leave: on a full, slow or broken disk slots go on, and nothing grows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer import procs, statefile
from belayer.config import Slot
from belayer.errors import Refused
from belayer.messages.control import Incident
from belayer.paths import Paths
from belayer.story import Incidents
from belayerd.pair import Pair, State
from belayerd.records import Records
from belayerd.saved import SavedPair
from belayerd.watch import sweep
from tests.support.wait import eventually

SLOT = Slot(name="slot0", model="m")
INCIDENT = Incident(
    incident_id="inc-1", slot="slot0", at=1.0, cause="death", detail="", from_generation=1, to_generation=2,
    outcome="served",
)  # fmt: skip


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    error = warning = info


@pytest.fixture
def paths() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:  # short: sockets lie below it
        yield Paths(folder).make()


def kept(paths: Paths, pair: Pair, log: Log, *, broken: bool = False) -> None:
    """Save ``pair``, and let its generation reach the disk, or the log say why it does not. ``broken``: a file is where
    its folder should be, so that every write fails, as on a full or broken disk."""

    async def main() -> None:
        saved = SavedPair(paths, SLOT, log)
        saved.load()
        if broken:
            (paths.state / "slots").write_text("")
        keeping = asyncio.create_task(saved.keep())
        saved.save(pair)
        on_disk = paths.slot_generation("slot0").is_file
        await asyncio.to_thread(eventually, lambda: on_disk() or log.lines, what="the disk's answer")
        keeping.cancel()

    asyncio.run(main())


def load(paths: Paths) -> Pair:
    return SavedPair(paths, SLOT, Log()).load()


def test_a_pair_is_found_again_in_this_boot_and_its_generation_in_the_next(paths: Paths) -> None:
    pair = Pair(slot="slot0", state=State.EXPOSED, generation=7, boot_id=procs.boot_id())
    kept(paths, pair, Log())
    assert load(paths) == pair
    statefile.save(paths.slot_state("slot0"), msgspec.structs.replace(pair, boot_id="another"))
    assert load(paths) == Pair(slot="slot0", generation=7, boot_id=procs.boot_id()), "run may lie on a disk as well"
    paths.slot_state("slot0").unlink()
    assert load(paths) == Pair(slot="slot0", generation=7, boot_id=procs.boot_id())


def test_a_generation_that_did_not_reach_the_disk_reaches_it_in_the_next_life(paths: Paths) -> None:
    """belayerd was killed between the two, or the disk was full: after a reboot the number would be given again, and
    routers of other hosts would take the new main for the old one."""
    statefile.save(paths.slot_state("slot0"), Pair(slot="slot0", generation=7, boot_id=procs.boot_id()), durable=False)

    async def main() -> None:
        saved = SavedPair(paths, SLOT, Log())
        saved.load()
        keeping = asyncio.create_task(saved.keep())
        on_disk = paths.slot_generation("slot0").is_file
        await asyncio.to_thread(eventually, lambda: on_disk() or keeping.done(), within=20, what="it is on disk")
        keeping.cancel()

    asyncio.run(main())
    paths.slot_state("slot0").unlink()  # a reboot
    assert load(paths).generation == 7


def test_a_disk_that_takes_nothing_costs_no_handover(paths: Paths) -> None:
    log = Log()
    pair = Pair(slot="slot0", state=State.EXPOSED, generation=7, boot_id=procs.boot_id())
    kept(paths, pair, log, broken=True)
    assert [event for event, _ in log.lines] == ["generation not on disk"]
    assert statefile.load(paths.slot_state("slot0"), Pair) == pair


@pytest.mark.parametrize("how", ["no database", "no folder"])
def test_a_record_that_cannot_be_written_is_said_and_ends_nobody(tmp_path: Path, how: str) -> None:
    log = Log()
    path = tmp_path / "folder" / "incidents.db"
    if how == "no folder":
        path.parent.write_text("")
    else:
        path.parent.mkdir()
        path.write_bytes(b"torn by a power cut" * 1000)
    records = Records(path, log)
    records.put(INCIDENT)
    records.transition(1.0, "slot0", "protected", "handover", "WorkerLost", 1)
    assert [event for event, _ in log.lines] == ["not on record"] * 2
    with pytest.raises(Refused, match="cannot be read"):
        records.latest()
    (path.parent if how == "no folder" else path).unlink()  # the disk is well again
    records.put(INCIDENT)
    assert records.latest(1 << 63) == [INCIDENT]
    records.close()
    assert len(log.lines) == 2


def test_the_newest_of_many_incidents_are_found_by_an_index(tmp_path: Path) -> None:
    store = Incidents(tmp_path / "incidents.db")
    plan = store._db.execute("EXPLAIN QUERY PLAN SELECT body FROM incidents ORDER BY at DESC LIMIT 50").fetchall()
    assert "USING INDEX incidents_at" in plan[0][3], plan
    store.close()


def test_a_logger_outlives_a_full_disk() -> None:
    """/dev/full answers each write as a full disk does; a worker that ended by its log line would take its slot
    along."""
    script = (
        "import os\nfrom belayer import log\nlogger = log.setup('worker')\n"
        "for at in range(100):\n    logger.info('x' * 1000, at=at)\nos.write(1, b'lived')\nos._exit(0)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (0, b"lived")


def test_whatever_a_dead_worker_left_goes(paths: Paths) -> None:
    cgroups = procs.Cgroups(f"test-{os.getpid()}")
    tmp = paths.worker_tmp("slot0-000000aa")
    (tmp / "folder").mkdir(parents=True)
    (tmp / "link").symlink_to(tmp / "folder")
    sweep(paths, cgroups, "slot0-000000aa")
    assert list((paths.run / "w").iterdir()) == []
    cgroups.remove_all()


def test_of_dead_workers_the_last_logs_stay(paths: Paths) -> None:
    """One log for each worker of ten thousand handovers would fill the disk in the end."""
    cgroups = procs.Cgroups(f"test-{os.getpid()}")
    names = [f"slot0-{at:08x}" for at in range(100)]
    others = ["slot0-extra", "slot0", "slot01-00000001", "zygote", "a-slot0-00000001"]
    for at, name in enumerate([*names, *others]):
        paths.log(name).write_text("")
        os.utime(paths.log(name), (at, at))
    paths.heartbeat(names[0]).write_text("")  # the main, silent since it was started
    sweep(paths, cgroups, names[50])
    left = {path.stem for path in paths.log("x").parent.iterdir()}
    assert left == {names[0], *names[-32:], *others}
    cgroups.remove_all()
