"""What a container must be for a checkpoint of it to be whole: refused by name otherwise (promises E4, E7).

Judged twice over: by what Docker says it made, and by what is seen from inside (its mounts, its namespaces, its
filters), because a configuration is a wish. ``check`` is pure; ``look`` reads /proc. Every life passes here before it
is served: fresh, restored or re-adopted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envkeeper import mounts
from envkeeper.mounts import Mount

# Docker's default capabilities, less AUDIT_WRITE (which writes into the host's audit log). Bits of capability.h.
CAPABILITIES = dict(
    CHOWN=0, DAC_OVERRIDE=1, FOWNER=3, FSETID=4, KILL=5, SETGID=6, SETUID=7, SETPCAP=8, NET_BIND_SERVICE=10,
    NET_RAW=13, SYS_CHROOT=18, MKNOD=27, SETFCAP=31,
)  # fmt: skip
_ALLOWED = sum(1 << bit for bit in CAPABILITIES.values())
_SPACES = ("mnt", "pid", "ipc", "uts", "net", "user")
_FILTERED = 2  # Seccomp: of proc(5) status


@dataclass(frozen=True, slots=True)
class Inside:
    """PID 1 as the kernel shows it. ``spaces`` and ``host_spaces``: inodes of its namespaces and of the host's."""

    mounts: tuple[Mount, ...]
    seccomp: int
    no_new_privs: bool
    bounding: int
    spaces: dict[str, int]
    host_spaces: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is stable and for machines; ``text`` says what was seen."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def look(pid: int) -> Inside:
    """Raises FileNotFoundError or ProcessLookupError when the process has ended."""
    rows = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return Inside(
        mounts=tuple(mounts.of_process(pid)),
        seccomp=int(rows["Seccomp"]),
        no_new_privs=rows["NoNewPrivs"] == "1",
        bounding=int(rows["CapBnd"], 16),
        spaces={kind: _inode(pid, kind) for kind in _SPACES},
        host_spaces={kind: _inode("self", kind) for kind in _SPACES},
    )


def check(
    found: dict[str, Any], inside: Inside | None, *, runtime: str, bound: frozenset[str], holder: str = ""
) -> list[Finding]:
    """Reasons against the container ``found`` (Docker's inspect), empty when there is none. ``inside``: None when it
    does not run. ``bound``: where our own read-only binds and Docker's three files lie. ``holder``: id of the only
    container whose network it may share."""
    reasons = [*_config(found, runtime), *_spaces(found["HostConfig"], holder), *_mounts(found, bound)]
    if inside is not None:
        reasons += _inside(inside, bound, networked=bool(holder))
    return reasons


def _config(found: dict[str, Any], runtime: str) -> Iterator[Finding]:
    host, config = found["HostConfig"], found["Config"]
    if host.get("Runtime") != runtime:
        yield Finding("runtime", f"it runs with {host.get('Runtime')}, not {runtime}: nothing could restore it")
    if (found.get("GraphDriver") or {}).get("Name") != "overlay2":
        yield Finding("storage", f"its storage driver is {(found.get('GraphDriver') or {}).get('Name')}, not overlay2")
    if host.get("Privileged"):
        yield Finding("privileged", "it is privileged")
    if host.get("Devices") or host.get("DeviceRequests") or host.get("DeviceCgroupRules"):
        yield Finding("device", "it has devices of the host")
    extra = sorted({name.removeprefix("CAP_") for name in host.get("CapAdd") or ()} - set(CAPABILITIES))
    if extra:
        yield Finding("capability", f"it was given {', '.join(extra)}")
    if config.get("Tty"):
        yield Finding("tty", "it has a terminal")
    if config.get("OpenStdin"):
        yield Finding("stdin", "its standard input is open to Docker")
    if host.get("AutoRemove"):
        yield Finding("auto_remove", "it is removed when it ends, and its upper layer with it")
    if (host.get("RestartPolicy") or {}).get("Name") not in ("", "no", None):
        yield Finding("restart_policy", "Docker would start it again, cold, behind our back")
    if (config.get("Healthcheck") or {}).get("Test") not in (None, [], ["NONE"]):
        yield Finding("health_check", "its health check runs programs at moments of its own")
    if host.get("Init"):
        yield Finding("init", "its PID 1 is docker-init, which dumps but does not restore")
    if host.get("ReadonlyRootfs"):
        yield Finding("read_only_root", "its root is read-only: the agent cannot listen in it")
    if any(option.startswith(("seccomp=unconfined", "seccomp:unconfined")) for option in host.get("SecurityOpt") or ()):
        yield Finding("seccomp", "its system calls are not filtered")


def _spaces(host: dict[str, Any], holder: str) -> Iterator[Finding]:
    for key, name in (("PidMode", "pid"), ("IpcMode", "ipc"), ("UTSMode", "uts"), ("UsernsMode", "user")):
        mode = host.get(key) or ""
        if mode == "host" and name != "user":
            yield Finding(f"host_{name}", f"it lives in the host's {name} namespace")
        elif mode.startswith("container:") or mode == "shareable":
            yield Finding(f"shared_{name}", f"its {name} namespace is {mode}: what it shares is in no checkpoint")
    network = host.get("NetworkMode") or ""
    if network == "host":
        yield Finding("host_net", "it lives in the host's network")
    elif network != "none" and not (holder and network == f"container:{holder}"):
        yield Finding("network", f"its network is {network}: only none, or that of its own holder, comes back")


def _mounts(found: dict[str, Any], bound: frozenset[str]) -> Iterator[Finding]:
    for mount in found.get("Mounts") or ():
        where, source = mount.get("Destination", ""), mount.get("Source", "")
        if source.endswith(("docker.sock", "containerd.sock", "podman.sock")):
            yield Finding("docker_socket", f"{where} is {source}: it leads out of the sandbox")
        elif mount.get("Type") == "volume":
            yield Finding("volume", f"{where} is a volume: its content is in no checkpoint")
        elif mount.get("Type") == "tmpfs":
            yield Finding("tmpfs", f"{where} is a tmpfs that a fresh container would not have")
        elif mount.get("RW"):
            yield Finding("writable_bind", f"{where} is {source} of the host, writable")
        elif where not in bound:
            yield Finding("bind", f"{where} is {source} of the host: it may be another one at a restore")
    for where in found["HostConfig"].get("Tmpfs") or ():
        yield Finding("tmpfs", f"{where} is a tmpfs that a fresh container would not have")


def _inside(inside: Inside, bound: frozenset[str], *, networked: bool) -> Iterator[Finding]:
    for kind in ("mnt", "pid", "ipc", "uts", "net"):
        if inside.spaces[kind] == inside.host_spaces[kind]:
            yield Finding(f"host_{kind}", f"seen from inside: its {kind} namespace is the host's")
    if inside.spaces["user"] != inside.host_spaces["user"]:
        yield Finding("user_namespace", "it lives in a user namespace of its own: its owners on disk are shifted")
    if inside.seccomp != _FILTERED:
        yield Finding("seccomp", "seen from inside: its system calls are not filtered")
    if not inside.no_new_privs:
        yield Finding("new_privileges", "seen from inside: its programs may gain privileges (setuid)")
    allowed = _ALLOWED & ~(1 << CAPABILITIES["NET_RAW"]) if networked else _ALLOWED
    more = inside.bounding & ~allowed
    if more:
        yield Finding("capability", f"seen from inside: it may have capabilities {more:#x} beyond those of a sandbox")
    for mount in mounts.split(list(inside.mounts), bound).foreign:
        yield Finding("mount", f"seen from inside: {mount.point} is {mount.kind} {mount.root} of {mount.source}")
    for mount in inside.mounts:
        usual = mount.point in _TMPFS or mount.root == "/null" or mount.point.startswith(("/proc/", "/sys/"))
        if mount.kind == "tmpfs" and not usual and mount.point not in bound:  # /run of a host is a tmpfs
            yield Finding("tmpfs", f"seen from inside: {mount.point} is a tmpfs that a fresh container would not have")


_TMPFS = frozenset({"/dev", "/dev/shm", "/sys/fs/cgroup"})  # what every container gets from the runtime


def _inode(pid: int | str, kind: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
