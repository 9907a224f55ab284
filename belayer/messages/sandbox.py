"""envkeeper's socket: sandboxes, actions, checkpoints."""

from __future__ import annotations

from belayer.messages.common import Done, ErrorReply, FaultProof, Message, Ping, Pong


class CreateSandbox(Message, frozen=True, kw_only=True, tag=True):
    """A fresh sandbox from ``image`` ("" for the configured one). Limits of 0 mean the configured ones."""

    image: str = ""
    name: str = ""
    memory_mb: int = 0
    cpus: float = 0.0
    pids: int = 0
    env: dict[str, str] = {}


class SandboxInfo(Message, frozen=True, kw_only=True, tag=True):
    """``boundary``: committed actions so far; ``ready_boundary``: that of the READY checkpoint, -1 for none."""

    sandbox_id: str
    incarnation: str
    state: str
    boundary: int
    container_id: str = ""
    pid: int = 0
    image: str = ""
    ready_boundary: int = -1
    ready_checkpoint: str = ""
    context_digest: str = ""
    reason: str = ""


class ExecAction(Message, frozen=True, kw_only=True, tag=True):
    """One action at boundary ``boundary``; refused when the sandbox is at another one (promise E3).
    ``context_digest`` is that of L_k, the context that led to this action."""

    sandbox_id: str
    incarnation: str
    boundary: int
    command: str
    timeout_s: float = 0.0
    context_digest: str = ""


class Observation(Message, frozen=True, kw_only=True, tag=True):
    """A committed observation. ``boundary`` is the new k. ``stdout``/``stderr`` are UTF-8 with replacement."""

    sandbox_id: str
    incarnation: str
    boundary: int
    stdout: str
    stderr: str
    exit_code: int
    ms: float
    timed_out: bool = False
    truncated: bool = False


class FullCheckpoint(Message, frozen=True, kw_only=True, tag=True):
    """Checkpoint the prefix (L_k, E_k): ``boundary`` and ``context_digest`` must be those of the sandbox now."""

    sandbox_id: str
    incarnation: str
    boundary: int
    context_digest: str


class CheckpointInfo(Message, frozen=True, kw_only=True, tag=True):
    """``frozen_ms``: time in which no process of the sandbox ran. ``nbytes``: on disk."""

    checkpoint_id: str
    sandbox_id: str
    boundary: int
    context_digest: str
    digest: str
    frozen_ms: float
    total_ms: float
    nbytes: int
    phases_ms: dict[str, float] = {}
    tier: str = "full"


class FullRestore(Message, frozen=True, kw_only=True, tag=True):
    """Restore READY (or ``checkpoint_id``) into a fresh container; the old life is fenced first. ``incarnation``: the
    life that was lost; when it is no longer the last one, another restorer has won (ClaimTaken)."""

    sandbox_id: str
    checkpoint_id: str = ""
    incarnation: str = ""


class RestoreInfo(Message, frozen=True, kw_only=True, tag=True):
    """``context_digest`` is that of the L_k that belongs to the restored E_k; ``proof`` says what was compared."""

    sandbox_id: str
    incarnation: str
    checkpoint_id: str
    boundary: int
    context_digest: str
    container_id: str
    total_ms: float
    phases_ms: dict[str, float] = {}
    proof: str = ""


class ListSandboxes(Message, frozen=True, kw_only=True, tag=True):
    pass


class SandboxList(Message, frozen=True, kw_only=True, tag=True):
    sandboxes: tuple[SandboxInfo, ...]
    instance: str = ""
    pid: int = 0


class ListCheckpoints(Message, frozen=True, kw_only=True, tag=True):
    sandbox_id: str


class CheckpointList(Message, frozen=True, kw_only=True, tag=True):
    checkpoints: tuple[CheckpointInfo, ...]
    ready: str = ""


class DestroySandbox(Message, frozen=True, kw_only=True, tag=True):
    """Ends the life and, with ``keep_checkpoints`` false, removes its checkpoints (promise E8)."""

    sandbox_id: str
    keep_checkpoints: bool = False


class InjectSandboxFault(Message, frozen=True, kw_only=True, tag=True):
    """``kind``: "kill" (SIGKILL to PID 1 of the container, seen dead through its pidfd)."""

    sandbox_id: str
    kind: str = "kill"


Request = (
    Ping
    | CreateSandbox
    | ExecAction
    | FullCheckpoint
    | FullRestore
    | ListSandboxes
    | ListCheckpoints
    | DestroySandbox
    | InjectSandboxFault
)
Reply = (
    Pong
    | SandboxInfo
    | Observation
    | CheckpointInfo
    | RestoreInfo
    | SandboxList
    | CheckpointList
    | FaultProof
    | Done
    | ErrorReply
)
