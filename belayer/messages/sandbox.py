"""envkeeper's socket: sandboxes, actions, checkpoints."""

from __future__ import annotations

from belayer.messages.common import Done, ErrorReply, FaultProof, Message, Ping, Pong

MIN_ACTION_S, MAX_ACTION_S = 0.001, 86_400.0  # the agent counts milliseconds, and 0 of them would be no limit


class CreateSandbox(Message, frozen=True, kw_only=True, tag=True):
    """A fresh sandbox from ``image`` ("" for the configured one). Limits of 0 and a ``hostname`` of "" mean the
    configured ones. ``user``: of its actions, "" for the one that the image names. ``allow``: egress, as
    ADDRESS[/BITS]:PORT[-PORT][/tcp|udp], within what the host's configuration allows; () is no network at all.
    ``labels`` go to its container."""

    image: str = ""
    name: str = ""
    memory_mb: int = 0
    cpus: float = 0.0
    pids: int = 0
    disk_mb: int = 0
    env: dict[str, str] = {}
    user: str = ""
    hostname: str = ""
    allow: tuple[str, ...] = ()
    labels: dict[str, str] = {}


class SandboxInfo(Message, frozen=True, kw_only=True, tag=True):
    """``boundary``: committed actions so far; ``ready_boundary``: that of the READY checkpoint, -1 for none.
    ``user``: of its actions; ``allow``: its egress; ``labels``: as they were given."""

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
    user: str = ""
    allow: tuple[str, ...] = ()
    labels: dict[str, str] = {}


class ExecAction(Message, frozen=True, kw_only=True, tag=True):
    """One action at boundary ``boundary``; refused when the sandbox is at another one (promise E3).

    Either ``command``, a script for the long-lived shell of ``session`` ("" is a session like any other), or ``argv``,
    a program that is run directly, also in an image without a shell. In a session ``env`` is exported and ``cwd``
    entered before the script and both stay; for ``argv`` they hold for that one program. ``user``: name or uid of the
    image, each with ":group" if wanted, "" for the sandbox's own; a session keeps the user that it began with.
    ``stdin`` of None is /dev/null. ``max_output``: bytes kept of each stream, at most 4 MiB, 0 for the configured
    number; half of them from its beginning and half from its end. ``timeout_s``: 0.001 to 86 400, 0 for the configured
    one. ``context_digest`` is that of L_k, the context that led to this."""

    sandbox_id: str
    incarnation: str
    boundary: int
    command: str = ""
    argv: tuple[str, ...] = ()
    session: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    user: str = ""
    stdin: bytes | None = None
    timeout_s: float = 0.0
    max_output: int = 0
    context_digest: str = ""


class Usage(Message, frozen=True, kw_only=True, tag=True):
    """What one action used. ``user_s``, ``system_s``: CPU seconds of its own processes that have ended. ``max_rss_kb``
    (``argv`` only, else 0): largest resident set of its program. ``sandbox_cpu_s``, ``sandbox_peak_bytes``: of the
    whole sandbox meanwhile, services and page cache included; 0 where the kernel does not tell."""

    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kb: int = 0
    sandbox_cpu_s: float = 0.0
    sandbox_peak_bytes: int = 0


class Observation(Message, frozen=True, kw_only=True, tag=True):
    """A committed observation. ``boundary`` is the new k. ``stdout``/``stderr`` are UTF-8 with replacement; what was
    left out of the middle is said in its place, and ``*_bytes`` count all that was written.

    ``limit`` names a limit of the sandbox that was met: memory, when the kernel killed a process of it meanwhile, which
    need not be the action's last; disk, when it holds more at the end. ``exit_code`` is 124 when the action was ended
    (``timed_out``, or ``limit``: for growing beyond its disk), and 128+``signal`` when its program was killed.
    ``session_ended``: the shell is gone (it exited, or was killed with its action); the next action of that session
    begins a fresh one, after a kill in the same directory."""

    sandbox_id: str
    incarnation: str
    boundary: int
    stdout: str
    stderr: str
    exit_code: int
    ms: float
    timed_out: bool = False
    truncated: bool = False
    signal: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    session_ended: bool = False
    limit: str = ""
    usage: Usage = Usage()


class FileIn(Message, frozen=True, kw_only=True, tag=True):
    """One file for the sandbox. ``path`` is absolute there; missing folders are made. ``append`` adds to a file that
    exists; otherwise it appears whole, in place of what had that name. ``user`` owns it, "" for the sandbox's own. A
    ``mode`` with ``stat.S_IFDIR`` is a folder, without data; one that is there already stays as it is."""

    path: str
    data: bytes
    mode: int = 0o644
    user: str = ""
    append: bool = False


class WriteFiles(Message, frozen=True, kw_only=True, tag=True):
    """Puts ``files`` into the sandbox, in order. It changes E_k and therefore counts as one action: k grows by one."""

    sandbox_id: str
    incarnation: str
    boundary: int
    files: tuple[FileIn, ...]
    context_digest: str = ""


class FilesWritten(Message, frozen=True, kw_only=True, tag=True):
    """``written``: how many of them; fewer than were sent when one ``failed``, for the reason given."""

    boundary: int
    written: int
    failed: str = ""


class ReadPath(Message, frozen=True, kw_only=True, tag=True):
    """Read a file or list a folder; nothing changes and k stays. ``most``: bytes, at most 4 MiB at once."""

    sandbox_id: str
    incarnation: str
    path: str
    offset: int = 0
    most: int = 4 << 20


class PathContent(Message, frozen=True, kw_only=True, tag=True):
    """``size`` and ``mode`` (st_mode) of what is there; ``data`` of a file from the offset, or ``names`` of a folder
    (bytes that are no UTF-8 as surrogate escapes are not sent: they are replaced)."""

    size: int
    mode: int
    data: bytes = b""
    names: tuple[str, ...] = ()


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
    every step that was tried, the last of which succeeded; ``notes``: of abandoned attempts, oldest first.
    ``clock_gap_s``: what the wall clock jumped; ``stale``: ``kind: sentence`` of what lies outside of the checkpoint
    and is another now (expired_credential, changed_image, outside_effects)."""

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
    clock_gap_s: float = 0.0
    stale: tuple[str, ...] = ()


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
    """``waiting``: sandboxes of the pool, which are in no list until they have a name."""

    sandboxes: tuple[SandboxInfo, ...]
    instance: str = ""
    pid: int = 0
    waiting: int = 0


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
    | WriteFiles
    | ReadPath
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
    | FilesWritten
    | PathContent
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
