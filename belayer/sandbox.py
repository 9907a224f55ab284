"""Client of envkeeper: a sandbox that survives its death.

    box = Sandbox.create()
    seen = box.exec("ls", context=messages)           # Observation, or SandboxLost: never an error text in disguise
    box.checkpoint(messages + [seen.stdout])          # the prefix (L_k, E_k) becomes READY
    try: box.exec("make test", context=...)
    except SandboxLost: boundary, digest = box.restore()   # roll the LLM context back to the one with this digest

Blocking; one instance per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from belayer.errors import DaemonUnreachable, SandboxLost
from belayer.messages.common import Done, FaultProof
from belayer.messages.sandbox import (
    CheckpointInfo,
    CheckpointList,
    CreateSandbox,
    DestroySandbox,
    ExecAction,
    Forked,
    ForkSandbox,
    FullCheckpoint,
    FullRestore,
    InjectSandboxFault,
    ListCheckpoints,
    ListSandboxes,
    Observation,
    RestoreInfo,
    SandboxInfo,
    SandboxList,
)
from belayer.paths import Paths
from belayer.rpc import SyncClient
from belayer.trajectory import context_digest

_SLACK_S = 30.0  # what an answer may take beyond the action's own limit
_LONG_S = 300.0


class Sandbox:
    """One sandbox at its boundary. ``info`` is what envkeeper last said about it."""

    def __init__(self, client: SyncClient, info: SandboxInfo, sock: Path) -> None:
        self._client, self._sock = client, sock
        self.sandbox_id, self.incarnation, self.boundary = info.sandbox_id, info.incarnation, info.boundary
        self.info = info

    @classmethod
    def create(
        cls,
        image: str = "",
        *,
        name: str = "",
        memory_mb: int = 0,
        cpus: float = 0.0,
        pids: int = 0,
        env: dict[str, str] | None = None,
        paths: Paths | None = None,
    ) -> Self:
        """A fresh sandbox; "" and 0 mean what the configuration says. Raises HostUnfit, Refused."""
        client, sock = _connect(paths)
        ask = CreateSandbox(image=image, name=name, memory_mb=memory_mb, cpus=cpus, pids=pids, env=env or {})
        return cls(client, client.call(ask, SandboxInfo, _LONG_S), sock)

    @classmethod
    def attach(cls, sandbox_id: str, *, paths: Paths | None = None) -> Self:
        """A sandbox that exists, at the boundary it is at. Raises DaemonUnreachable, SandboxUnknown."""
        client, sock = _connect(paths)
        listed = client.call(ListSandboxes(), SandboxList)
        found = next((row for row in listed.sandboxes if row.sandbox_id == sandbox_id), None)
        if found is None:
            client.call(ListCheckpoints(sandbox_id=sandbox_id), CheckpointList)  # raises SandboxUnknown
            raise DaemonUnreachable(f"sandbox {sandbox_id} vanished while it was being looked up")
        return cls(client, found, sock)

    def exec(self, command: str, *, context: Sequence[Any] = (), timeout_s: float = 0.0) -> Observation:
        """Run one action in the sandbox's shell. ``context``: the messages that led to it (L_k). Raises SandboxLost
        when its fate is unknown: then nothing was observed and nothing may be replayed."""
        ask = ExecAction(
            sandbox_id=self.sandbox_id,
            incarnation=self.incarnation,
            boundary=self.boundary,
            command=command,
            timeout_s=timeout_s,
            context_digest=context_digest(context),
        )
        instance = self._instance()
        try:
            seen = self._client.call(
                ask, Observation, (timeout_s or _LONG_S) + _SLACK_S, lambda: self._instance() in (instance, None)
            )
        except DaemonUnreachable as why:
            if self._instance() in (instance, None):
                raise
            raise SandboxLost(
                f"envkeeper was replaced while action {self.boundary + 1} ran: its observation was given to nobody",
                remedy="restore, and generate again from that boundary",
            ) from why
        self.boundary = seen.boundary
        return seen

    def checkpoint(self, context: Sequence[Any] = ()) -> CheckpointInfo:
        """Make this boundary, with ``context`` as its L_k, the READY prefix."""
        ask = FullCheckpoint(
            sandbox_id=self.sandbox_id,
            incarnation=self.incarnation,
            boundary=self.boundary,
            context_digest=context_digest(context),
        )
        return self._client.call(ask, CheckpointInfo, _LONG_S)

    def restore(self, checkpoint_id: str = "") -> tuple[int, str]:
        """Back to READY (or ``checkpoint_id``) in a fresh container: (boundary, digest of its L_k). Raises
        ClaimTaken when another restorer has won, RestoreFailed when nothing was restored."""
        back = self.restore_info(checkpoint_id)
        return back.boundary, back.context_digest

    def restore_info(
        self,
        checkpoint_id: str = "",
        *,
        note: str = "",
        allow_older: bool | None = None,
        allow_base: bool = False,
    ) -> RestoreInfo:
        """``restore`` with its milliseconds, its proof, the steps that were tried, and the notes of abandoned
        attempts. ``note``: what went wrong in this one, for the next (also readable inside, in /run/belayer/notes)."""
        ask = FullRestore(
            sandbox_id=self.sandbox_id,
            checkpoint_id=checkpoint_id,
            incarnation=self.incarnation,
            note=note,
            allow_older=allow_older,
            allow_base=allow_base,
        )
        back = self._client.call(ask, RestoreInfo, _LONG_S)
        self.incarnation, self.boundary = back.incarnation, back.boundary
        return back

    def fork(self, count: int = 1, *, names: Sequence[str] = (), checkpoint_id: str = "", note: str = "") -> list[Self]:
        """``count`` new sandboxes (or one per name) that begin at READY (or ``checkpoint_id``); this one goes on."""
        ask = ForkSandbox(
            sandbox_id=self.sandbox_id, checkpoint_id=checkpoint_id, count=count, names=tuple(names), note=note
        )
        made = self._client.call(ask, Forked, _LONG_S)
        listed = {row.sandbox_id: row for row in self._client.call(ListSandboxes(), SandboxList).sandboxes}
        return [type(self)(SyncClient(self._sock), listed[fork.sandbox_id], self._sock) for fork in made.forks]

    def checkpoints(self) -> CheckpointList:
        return self._client.call(ListCheckpoints(sandbox_id=self.sandbox_id), CheckpointList)

    def kill(self) -> FaultProof:
        """Break it on purpose: SIGKILL to its PID 1, seen dead."""
        return self._client.call(InjectSandboxFault(sandbox_id=self.sandbox_id), FaultProof)

    def destroy(self, *, keep_checkpoints: bool = False) -> None:
        self._client.call(DestroySandbox(sandbox_id=self.sandbox_id, keep_checkpoints=keep_checkpoints), Done, _LONG_S)
        self._client.close()

    def _instance(self) -> tuple[int, int] | None:
        """Which life of envkeeper holds the socket, by its file (each life binds anew); None when none does (it may be
        on its way back)."""
        try:
            seen = self._sock.stat()
        except FileNotFoundError:
            return None
        return seen.st_ino, seen.st_ctime_ns

    def __repr__(self) -> str:
        return f"<Sandbox {self.sandbox_id} at boundary {self.boundary}>"

    def close(self) -> None:
        """Let go of the connection; the sandbox lives on."""
        self._client.close()


def _connect(paths: Paths | None) -> tuple[SyncClient, Path]:
    sock = (paths or Paths()).envkeeper_sock
    if not sock.exists():
        raise DaemonUnreachable(f"no socket at {sock}", remedy="start envkeeper, or set BELAYER_ROOT")
    return SyncClient(sock), sock
