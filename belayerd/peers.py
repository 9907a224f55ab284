"""The daemons that belayerd depends on: it starts the zygote, and notices when the router is another instance."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from belayer import lastwords, procs
from belayer.daemon import EXIT_CONFIG
from belayer.errors import BadMessage, BelayerError, DaemonUnreachable
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.router import RouterStatus, RouterStatusReply, SlotsGivenUp
from belayer.paths import Paths
from belayer.rpc import Client
from belayer.seqpacket import SeqClient
from belayerd.pair import Pair

_PING_S = 5.0
_HOPELESS = 3  # starts in a row that failed; it is tried on, and said to be hopeless
_BUSY = 0
_IMPORT_S = 120.0  # importing vLLM takes 8-12 s of CPU, far longer on a busy host: then this is said
_MODULE = "belayerd.worker.zygote"


class Zygote:
    """Keeps one zygote alive: adopts a running one, starts one when there is none, replaces one that died.

    ``failure``: why the last start failed, "" while one answers or is on its way for the first time. ``told`` hears
    each new one. ``hopeless``: it refused by name, or too many starts in a row failed."""

    def __init__(self, paths: Paths, config_path: Path, log: Any, told: Callable[[str], None]) -> None:
        self._paths, self._config_path, self._log, self._told = paths, config_path, log, told
        self.ready = asyncio.Event()
        self.pid = 0
        self.restarts = -1
        self.failure, self.hopeless, self._failures = "", False, 0
        self._awaited = 0  # pid of one on its way

    async def run(self) -> None:
        while True:
            self.pid = pid = await self._up()
            self.restarts += 1
            self.failure, self.hopeless, self._failures = "", False, 0
            self.ready.set()
            self._log.info("zygote ready", pid=pid)
            await self._death(pid)
            self.ready.clear()
            self._log.warning("zygote died; workers live on, a new one is started", pid=pid)

    async def _up(self) -> int:
        """Pid of a zygote that answers. Slots serve without one, so this never ends belayerd; it goes on trying."""
        while True:
            pid = await asyncio.to_thread(self._ping)
            if pid:
                return pid
            if pid is _BUSY:
                self._log.warning("zygote does not answer; it lives, so it is waited for")
                continue
            coming = self._importing()
            if coming:
                if coming != self._awaited:
                    self._awaited = coming
                    self._log.info("a zygote is on its way; it is waited for", pid=coming)
                await asyncio.sleep(0.2)
                continue
            try:
                return await self._start()
            except DaemonUnreachable as why:
                self._log.error("no zygote; trying again", why=str(why))
                if why.message != self.failure:
                    self.failure = why.message
                    self._told(why.message)
                await asyncio.sleep(1.0)

    def _ping(self) -> int | None:
        """Its pid; _BUSY when it holds its socket but says nothing in time; None when nobody listens."""
        try:
            client = SeqClient(self._paths.zygote_sock, _PING_S)
        except DaemonUnreachable:
            return None
        try:
            return client.call(Ping(), Pong)[0].pid
        except DaemonUnreachable:
            return _BUSY
        finally:
            client.close()

    def _importing(self) -> int:
        """Pid of a zygote that holds the lock of this host and does not listen yet, 0: none. A life of belayerd before
        this one may have started it, or it is slower than most. Its configuration is looked at too: the lock of a dead
        one names a pid that another host's zygote may have by now."""
        try:
            pid = int((self._paths.run / "zygote.lock").read_text() or 0)
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return pid if _MODULE.encode() in words and str(self._config_path).encode() in words else 0

    async def _start(self) -> int:
        words = self._paths.last_words("zygote")
        words.unlink(missing_ok=True)
        kills = lastwords.oom_kills("")
        try:
            child = await asyncio.to_thread(self._fork)
        except OSError as why:  # no memory, or no room for its log: neither is a reason to leave slots unwatched
            self._failures += 1
            self.hopeless = self._failures >= _HOPELESS
            raise DaemonUnreachable(f"the zygote cannot be started: {why}") from why
        waited = 0.0
        while child.poll() is None and waited < _IMPORT_S:
            pid = await asyncio.to_thread(self._ping)
            if pid:  # one that listens and is slow to answer has no pid yet
                return pid
            await asyncio.sleep(0.1)
            waited += 0.1
        code = child.poll()
        if code is None:
            raise DaemonUnreachable(
                f"the zygote (pid {child.pid}) gave no answer in {_IMPORT_S:.0f} s; it is waited for, until it ends; "
                f"log at {self._paths.log('zygote')}"
            )
        self._failures += 1
        self.hopeless = code == EXIT_CONFIG or self._failures >= _HOPELESS
        said = lastwords.read(words) or lastwords.how(code, child.pid, kills, lastwords.oom_kills(""))
        raise DaemonUnreachable(f"the zygote did not start: {said}; log at {self._paths.log('zygote')}")

    def _fork(self) -> subprocess.Popen[bytes]:
        """In a session of its own and without our pipes: it outlives us, and so do its workers."""
        log = os.open(self._paths.log("zygote"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        command = [sys.executable, "-m", _MODULE, "--config", str(self._config_path)]
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        finally:
            os.close(log)

    async def _death(self, pid: int) -> None:
        try:
            fd = procs.open_pidfd(pid, procs.start_time(pid))
        except BelayerError:
            return
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, dead.set)
        try:
            await dead.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)


def links_given_up(status: RouterStatusReply, pairs: Iterable[Pair]) -> list[tuple[str, str]]:
    """Slot and worker of mains that are whole for belayerd and that the router does not talk to any more: nobody would
    serve that slot until its next generation. Pure."""
    mains = {(pair.slot, pair.generation, pair.main.worker_id) for pair in pairs if pair.main and not pair.running}
    return [
        (row.slot, row.worker_id)
        for row in status.slots
        if row.link_given_up and (row.slot, row.generation, row.worker_id) in mains
    ]


class RouterPeer:
    """Polls the router; tells ``back`` when it is another instance than the one before, and ``seen`` what it says.
    ``given_up``: slots that do not come back by themselves; a router that knows another set is told, for it lets its
    clients wait for the others."""

    def __init__(
        self,
        client: Client,
        back: Callable[[], None],
        given_up: Callable[[], tuple[str, ...]],
        seen: Callable[[RouterStatusReply], None],
        log: Any,
    ) -> None:
        self._client, self._back, self._given_up, self._seen, self._log = client, back, given_up, seen, log
        self.status: RouterStatusReply | None = None
        self._instance = ""

    async def run(self) -> None:
        while True:
            try:
                self.status = await self._client.call(RouterStatus(), RouterStatusReply, 2.0)
                await self._tell(self.status.given_up)
            except DaemonUnreachable:
                if self.status is not None:
                    self._log.warning("router does not answer")
                self.status = None
            else:
                self._notice(self.status.instance)
                self._seen(self.status)
            await asyncio.sleep(0.5)

    async def _tell(self, known: tuple[str, ...]) -> None:
        if known == (slots := self._given_up()):
            return
        try:
            await self._client.call(SlotsGivenUp(slots=slots), Done, 2.0)
        except BadMessage as why:  # a router from before there was this message, until it is restarted
            self._log.warning("router does not take it", what="slots given up", why=str(why))

    def _notice(self, instance: str) -> None:
        if instance != self._instance:
            self._log.info("router", instance=instance)
            self._instance = instance
            self._back()
