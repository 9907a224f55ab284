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
    life that was lost; when it is no longer the last one, another restorer has won (ClaimTaken).

    When that checkpoint fails, its ancestors are tried, newest first, if ``allow_older`` (left out: only when no
    ``checkpoint_id`` was named), and at last the image itself if ``allow_base``. ``note``: what went wrong in the
    attempt that is given up; the next one finds it in /run/belayer/notes and in the answer."""

    sandbox_id: str
    checkpoint_id: str = ""
    incarnation: str = ""
    allow_older: bool | None = None
    allow_base: bool = False
    note: str = ""


class RestoreInfo(Message, frozen=True, kw_only=True, tag=True):
    """``context_digest`` is that of the L_k that belongs to the restored E_k ("" at boundary 0 of the image);
    ``checkpoint_id`` is what was really restored, "" for the image; ``proof`` says what was compared; ``path`` names
    every step that was tried, the last of which succeeded; ``notes``: of abandoned attempts, oldest first."""

    sandbox_id: str
    incarnation: str
    checkpoint_id: str
    boundary: int
    context_digest: str
    container_id: str
    total_ms: float
    phases_ms: dict[str, float] = {}
    proof: str = ""
    path: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class ForkSandbox(Message, frozen=True, kw_only=True, tag=True):
    """``count`` new sandboxes (or one for each of ``names``) that begin at READY of ``sandbox_id`` (or at
    ``checkpoint_id``), which goes on as it is. They share the bytes of that checkpoint. All of them or none.
    ``sandbox_id`` may have ended, if its checkpoints were kept."""

    sandbox_id: str
    checkpoint_id: str = ""
    count: int = 1
    names: tuple[str, ...] = ()
    note: str = ""


class Forked(Message, frozen=True, kw_only=True, tag=True):
    """One RestoreInfo for each fork, in order."""

    forks: tuple[RestoreInfo, ...]
    total_ms: float


class Birth(Message, frozen=True, kw_only=True):
    """One life of a sandbox and where it came from. ``kind``: created, restored, rewound, forked, base.
    ``parent``: the incarnation that made ``checkpoint_id``; ``left_boundary``: where the life before it ended."""

    incarnation: str
    sandbox_id: str
    kind: str
    at: float
    parent: str = ""
    checkpoint_id: str = ""
    boundary: int = 0
    left_boundary: int = 0
    note: str = ""


class ListLineage(Message, frozen=True, kw_only=True, tag=True):
    """Of one sandbox, or of all ("")."""

    sandbox_id: str = ""


class Lineages(Message, frozen=True, kw_only=True, tag=True):
    """Births in order, by sandbox; a fork's begin with those of the sandbox that it came from."""

    births: dict[str, tuple[Birth, ...]]


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
    | ForkSandbox
    | ListLineage
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
    | Forked
    | Lineages
    | SandboxList
    | CheckpointList
    | FaultProof
    | Done
    | ErrorReply
)
