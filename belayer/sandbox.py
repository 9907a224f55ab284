"""Client of envkeeper: a sandbox that survives its death.

    box = Sandbox.create()
    seen = box.exec("ls", context=messages)           # Observation, or SandboxLost: never an error text in disguise
    box.checkpoint(messages + [seen.stdout])          # the prefix (L_k, E_k) becomes READY
    try: box.exec("make test", context=...)
    except SandboxLost: boundary, digest = box.restore()   # roll the LLM context back to the one with this digest

Blocking; one instance per thread: a call beside another one is refused, `Sandbox.attach` gives a second instance.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from belayer import transfer
from belayer.errors import BelayerError, DaemonUnreachable, Refused, SandboxLost
from belayer.lives import life_of
from belayer.messages.common import Done, FaultProof, Ping, Pong
from belayer.messages.sandbox import (
    MAX_ACTION_S,
    MIN_ACTION_S,
    CheckpointInfo,
    CheckpointList,
    CreateSandbox,
    DestroySandbox,
    ExecAction,
    FilesWritten,
    Forked,
    ForkSandbox,
    FullCheckpoint,
    FullRestore,
    InjectSandboxFault,
    ListCheckpoints,
    ListSandboxes,
    Observation,
    PathContent,
    ReadPath,
    RestoreInfo,
    SandboxInfo,
    SandboxList,
    WriteFiles,
)
from belayer.paths import Paths
from belayer.rpc import SyncClient
from belayer.trajectory import context_digest

R = TypeVar("R", bound=msgspec.Struct)

_SLACK_S = 30.0  # what an answer may take beyond the action's own limit
_LONG_S = 300.0
_SHORT_S = 60.0  # for an answer that a busy host gives late; a daemon that died ends the call at once


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
        disk_mb: int = 0,
        env: dict[str, str] | None = None,
        user: str = "",
        hostname: str = "",
        allow: Sequence[str] = (),
        labels: dict[str, str] | None = None,
        paths: Paths | None = None,
    ) -> Self:
        """A fresh sandbox, as said at ``CreateSandbox``. Raises HostUnfit, Refused."""
        client, sock = _connect(paths)
        ask = CreateSandbox(
            image=image,
            name=name,
            memory_mb=memory_mb,
            cpus=cpus,
            pids=pids,
            disk_mb=disk_mb,
            env=env or {},
            user=user,
            hostname=hostname,
            allow=tuple(allow),
            labels=labels or {},
        )
        return cls(client, _call(client, sock, ask, SandboxInfo, _LONG_S), sock)

    @classmethod
    def attach(cls, sandbox_id: str, *, paths: Paths | None = None) -> Self:
        """A sandbox that exists, at the boundary it is at. Raises DaemonUnreachable, SandboxUnknown."""
        client, sock = _connect(paths)
        listed = _call(client, sock, ListSandboxes(), SandboxList)
        found = next((row for row in listed.sandboxes if row.sandbox_id == sandbox_id), None)
        if found is None:
            _call(client, sock, ListCheckpoints(sandbox_id=sandbox_id), CheckpointList)  # raises SandboxUnknown
            raise DaemonUnreachable(f"sandbox {sandbox_id} vanished while it was being looked up")
        return cls(client, found, sock)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        context: Sequence[Any] = (),
        session: str = "",
        env: dict[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes | None = None,
        timeout_s: float = 0.0,
        max_output: int = 0,
    ) -> Observation:
        """Run one action: a string in the long-lived shell of ``session``, a sequence as a program of its own, without
        any shell. ``context``: the messages that led to it (L_k); the rest is said at ``ExecAction``. Raises
        SandboxLost when its fate is unknown: then nothing was observed and nothing may be replayed; Refused when it
        was not begun."""
        if timeout_s and not MIN_ACTION_S <= timeout_s <= MAX_ACTION_S:  # NaN is in no range
            allowed = f"{MIN_ACTION_S:g} to {MAX_ACTION_S:g}, or 0 for the configured one"
            raise Refused(f"timeout_s is {timeout_s}: allowed is {allowed}", kept="everything: nothing was begun")
        script = isinstance(command, str)
        if not script and not command:
            raise Refused("command is an empty sequence: it names no program", kept="everything: nothing was begun")
        ask = ExecAction(
            sandbox_id=self.sandbox_id,
            incarnation=self.incarnation,
            boundary=self.boundary,
            command=str(command) if script else "",
            argv=() if script else tuple(command),
            session=session,
            env=env or {},
            cwd=cwd,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=max_output,
            context_digest=context_digest(context),
        )
        seen = self._act(ask, Observation, timeout_s or _LONG_S)
        self.boundary = seen.boundary
        return seen

    def upload(self, source: Path | str, target: str, *, user: str = "", context: Sequence[Any] = ()) -> int:
        """Copy a file, or what is below a folder, to the absolute path ``target`` in the sandbox; the number of files.
        Regular files and folders with their permission bits (a folder that is there already keeps its own); anything
        else is refused before a byte is sent. It changes E_k: every message of at most ``transfer.PART`` bytes is one
        action, and ``boundary`` grows with it."""
        count = 0
        for files in transfer.parts(Path(source), target, user):
            ask = WriteFiles(
                sandbox_id=self.sandbox_id,
                incarnation=self.incarnation,
                boundary=self.boundary,
                files=tuple(files),
                context_digest=context_digest(context),
            )
            done = self._act(ask, FilesWritten, _LONG_S)
            self.boundary = done.boundary
            count += sum(not file.append and not stat.S_ISDIR(file.mode) for file in files[: done.written])
            if done.failed:
                raise Refused(f"upload to {target}: {done.failed}", kept=f"{count} files are there")
        return count

    def download(self, source: str, target: Path | str) -> int:
        """Copy a file, or what is below a folder, of the sandbox to ``target``, which must not exist; the number of
        files. Symlinks are followed inside the sandbox only; names that would leave ``target`` are refused."""

        def read(path: str, offset: int) -> PathContent:
            ask = ReadPath(sandbox_id=self.sandbox_id, incarnation=self.incarnation, path=path, offset=offset)
            return self._call(ask, PathContent, _LONG_S)

        return transfer.fetch(read, source, Path(target))

    def _act(self, ask: ExecAction | WriteFiles, kind: type[R], limit_s: float) -> R:
        lost = SandboxLost(
            f"envkeeper ended while action {self.boundary + 1} ran: its observation was given to nobody",
            remedy="restore, and generate again from that boundary",
        )
        return self._call(ask, kind, limit_s + _SLACK_S, lost)

    def _call(
        self, ask: msgspec.Struct, kind: type[R], limit_s: float = _SHORT_S, ended: BelayerError | None = None
    ) -> R:
        return _call(self._client, self._sock, ask, kind, limit_s, ended)

    def checkpoint(self, context: Sequence[Any] = ()) -> CheckpointInfo:
        """Make this boundary, with ``context`` as its L_k, the READY prefix."""
        ask = FullCheckpoint(
            sandbox_id=self.sandbox_id,
            incarnation=self.incarnation,
            boundary=self.boundary,
            context_digest=context_digest(context),
        )
        ended = DaemonUnreachable(
            f"envkeeper ended in a checkpoint of {self.sandbox_id}: boundary {self.boundary} was not seen READY",
            kept="the READY of before, or this one if it was whole already: never half of one",
            remedy="checkpoint again when envkeeper is back",
        )
        return self._call(ask, CheckpointInfo, _LONG_S, ended)

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
        back = self._call(ask, RestoreInfo, _LONG_S)
        self.incarnation, self.boundary = back.incarnation, back.boundary
        return back

    def fork(self, count: int = 1, *, names: Sequence[str] = (), checkpoint_id: str = "", note: str = "") -> list[Self]:
        """``count`` new sandboxes (or one per name) that begin at READY (or ``checkpoint_id``); this one goes on."""
        ask = ForkSandbox(
            sandbox_id=self.sandbox_id, checkpoint_id=checkpoint_id, count=count, names=tuple(names), note=note
        )
        return self._forked(self._client, self._sock, ask)

    @classmethod
    def fork_of(
        cls,
        sandbox_id: str,
        count: int = 1,
        *,
        names: Sequence[str] = (),
        checkpoint_id: str = "",
        note: str = "",
        paths: Paths | None = None,
    ) -> list[Self]:
        """``fork`` of a sandbox that may have ended, if its checkpoints were kept. Raises SandboxUnknown."""
        client, sock = _connect(paths)
        ask = ForkSandbox(
            sandbox_id=sandbox_id, checkpoint_id=checkpoint_id, count=count, names=tuple(names), note=note
        )
        try:
            return cls._forked(client, sock, ask)
        finally:
            client.close()

    @classmethod
    def _forked(cls, client: SyncClient, sock: Path, ask: ForkSandbox) -> list[Self]:
        made = _call(client, sock, ask, Forked, _LONG_S)
        listed = {row.sandbox_id: row for row in _call(client, sock, ListSandboxes(), SandboxList).sandboxes}
        return [cls(SyncClient(sock), listed[fork.sandbox_id], sock) for fork in made.forks]

    def checkpoints(self) -> CheckpointList:
        return self._call(ListCheckpoints(sandbox_id=self.sandbox_id), CheckpointList)

    def kill(self) -> FaultProof:
        """Break it on purpose: SIGKILL to its PID 1, seen dead."""
        return self._call(InjectSandboxFault(sandbox_id=self.sandbox_id), FaultProof, _LONG_S)

    def destroy(self, *, keep_checkpoints: bool = False) -> None:
        self._call(DestroySandbox(sandbox_id=self.sandbox_id, keep_checkpoints=keep_checkpoints), Done, _LONG_S)
        self._client.close()

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


def _call(
    client: SyncClient,
    sock: Path,
    ask: msgspec.Struct,
    kind: type[R],
    limit_s: float = _SHORT_S,
    ended: BelayerError | None = None,
) -> R:
    """One call that outlives its daemon by seconds only. ``ended`` is raised when the life of envkeeper that may have
    taken it is over: it will never be answered."""
    if life_of(sock) is None:
        client.call(Ping(), Pong, _SLACK_S)  # it may be on its way back; the limit of the call itself can be minutes
    life, over = life_of(sock), False

    def same_life() -> bool:  # asked only when the call was sent
        nonlocal life, over
        now = life_of(sock)
        life = life or now  # it was sent to the first one that came
        over = now is None or now != life
        return not over

    try:
        return client.call(ask, kind, limit_s, same_life)
    except DaemonUnreachable as why:
        if not over and (life is None or life_of(sock) == life):
            raise
        raise ended or DaemonUnreachable(
            f"envkeeper ended in {type(ask).__name__}: whether it was done is unknown",
            kept="READY checkpoints",
            remedy="when envkeeper is back, what it had not finished is undone or listed: see `belayerctl sandboxes`",
        ) from why
