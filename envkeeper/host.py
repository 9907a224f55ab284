"""What this host has: checked once at start, and named with a remedy when it is missing (exit 2, nothing created)."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from belayer.config import Envkeeper
from belayer.errors import HostUnfit, Refused
from belayer.paths import Paths
from envkeeper import marks, network, seccomp
from envkeeper.criu import SETTINGS_SHA256, Criu, search_path
from envkeeper.engine import Engine

PREFIX = Path("/opt/belayer")  # where `make setup` puts the native parts
RELOCKS = ("x86_64",)  # machines for which there is runtime/relock.c


@dataclass(frozen=True, slots=True)
class Host:
    """Tools of this host and their versions, which go into every manifest."""

    engine: Engine
    criu: Criu
    search: str
    agent: Path
    versions: dict[str, str]
    plugins: Path | None = None  # of CRIU's restore (runtime/relock.c); None on machines that have none


def inspect(config: Envkeeper, paths: Paths, prefix: Path = PREFIX) -> Host:
    """Blocking. Raises HostUnfit."""
    if os.geteuid() != 0:
        raise HostUnfit("envkeeper needs root: it freezes, dumps and restores processes", remedy="start it as root")
    agent = prefix / "agent" / "current"
    if not os.access(agent, os.X_OK):
        raise HostUnfit(f"no agent at {agent}", remedy="run `make setup`, or envkeeper/agent/build.sh")
    agent = agent.resolve()  # the versioned file: a restore needs the very same binary
    binary = Path(config.criu)
    search = search_path(binary, prefix / "lib" / "criu-path")
    criu = Criu(binary, search)
    version = ".".join(map(str, criu.version()))
    engine = Engine(config.docker, config.runtime, owner_of(paths), config.bridge)
    versions = engine.check() | {
        "criu": version,
        "agent": agent.name,
        "agent_sha256": sha256_of(agent),
        "runtime_sha256": sha256_of(prefix / "bin" / "belayer-runtime"),
        "criu_settings_sha256": SETTINGS_SHA256,
        "seccomp": seccomp.digest(),
        "engine_path": config.engine_path,
    }
    plugins = prefix / "lib" / "criu-plugins" if platform.machine() in RELOCKS else None
    if plugins is not None:
        versions["relock_sha256"] = sha256_of(plugins / "relock.so")
    if not Path(versions["data_root"]).is_dir():
        raise HostUnfit(
            f"Docker keeps its containers in {versions['data_root']}, which is not on this host",
            remedy="run envkeeper where Docker runs: it copies the upper layers of sandboxes",
        )
    engine.pin(config.image)
    try:
        network.permit((), config.egress)
    except Refused as why:
        raise HostUnfit(f"envkeeper.egress: {why.message}", remedy=why.remedy) from why
    cached = criu.cache_kernel_facts()
    marks.make_folder()
    return Host(engine, criu, search, agent, versions | {"kdat_cached": str(cached).lower()}, plugins)


def sha256_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError as why:
        raise HostUnfit(f"no {path}", remedy="run `make setup`, or envkeeper/agent/build.sh") from why


def owner_of(paths: Paths) -> str:
    """Label value of this root: several roots on one host never touch each other's containers."""
    return hashlib.sha256(str(paths.state).encode()).hexdigest()[:16]
