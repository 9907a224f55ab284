"""Docker, as little of it as a sandbox needs: create, start, look, kill, remove. Blocking; run in threads.

Sandboxes are sealed by what is asked for here (promise E7): no network unless named, nothing of the host mounted but
the agent (read-only), a fixed host name (the restored processes keep the old one), no health check (it would run
programs at random moments), no restart policy and no auto-removal (a life ends once, by our hand or seen by us), and
no docker-init: its containers dump but do not restore.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from belayer.errors import BelayerError, HostUnfit, RestoreFailed, SandboxLost
from envkeeper import lives, marks
from envkeeper.recipe import Recipe

AGENT_IN_SANDBOX = "/.belayer/agent"
LABEL = "belayer"
BOUND = frozenset({AGENT_IN_SANDBOX, lives.IN_SANDBOX, "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"})


@dataclass(frozen=True, slots=True)
class Life:
    """A running container: what a checkpoint must know before it freezes (Docker may hold its lock meanwhile)."""

    container_id: str
    pid: int
    upper: Path
    merged: Path


class Engine:
    """``url``: Docker's socket. ``runtime``: the name under which our OCI runtime is registered. ``owner``: label
    value that tells this root's containers from those of another envkeeper on the same host."""

    def __init__(self, url: str, runtime: str, owner: str) -> None:
        self._url, self._runtime, self._owner = url, runtime, owner
        self._local = threading.local()  # the HTTP session underneath is not made for threads

    def check(self) -> dict[str, str]:
        """Versions; raises HostUnfit with the remedy when Docker is not there or lacks what we need."""
        with self._names_faults():
            info = self._client().info()
            version = self._client().version()
        if info.get("Driver") != "overlay2":
            raise HostUnfit(
                f"Docker uses the storage driver {info.get('Driver')}; upper layers are copied raw from overlay2",
                remedy='set "storage-driver": "overlay2" in /etc/docker/daemon.json',
            )
        if self._runtime not in info.get("Runtimes", {}):
            raise HostUnfit(
                f"Docker does not know the runtime {self._runtime}",
                remedy=f'add "runtimes": {{"{self._runtime}": {{"path": "/opt/belayer/bin/belayer-runtime"}}}} to '
                "/etc/docker/daemon.json and reload dockerd",
            )
        return {
            "docker": version["Version"],
            "kernel": info.get("KernelVersion", ""),
            "storage": info["Driver"],
            "cgroup": str(info.get("CgroupVersion", "1")),
            "live_restore": str(info.get("LiveRestoreEnabled", False)),
            "data_root": info.get("DockerRootDir", ""),
        }

    def pin(self, image: str) -> str:
        """Content id of ``image``. Raises HostUnfit when it is not here, or when what it asks for cannot be
        checkpointed (volumes live outside of the upper layer)."""
        with self._names_faults():
            try:
                found = self._client().inspect_image(image)
            except docker.errors.ImageNotFound as why:
                raise HostUnfit(
                    f"no image {image} in this Docker", remedy="run `make setup`, or docker load it"
                ) from why
        config = found.get("Config") or {}
        if config.get("Volumes"):
            raise HostUnfit(
                f"image {image} declares volumes ({', '.join(config['Volumes'])}): their content is in no checkpoint",
                remedy="build it without VOLUME",
            )
        return str(found["Id"])

    def create(self, recipe: Recipe, sandbox_id: str, incarnation: str, told: Path | None = None) -> str:
        """A created, not started container; its id. ``told``: the folder of envkeeper.lives for this life."""
        client = self._client()
        binds = {recipe.agent: {"bind": AGENT_IN_SANDBOX, "mode": "ro"}}
        if told is not None:
            binds[str(told)] = {"bind": lives.IN_SANDBOX, "mode": "ro"}
        with self._names_faults():
            host = client.create_host_config(
                network_mode="none",
                mem_limit=recipe.memory_mb << 20,
                memswap_limit=recipe.memory_mb << 20,
                cpu_period=100_000,
                cpu_quota=max(1_000, int(recipe.cpus * 100_000)),
                pids_limit=recipe.pids,
                binds=binds,
                runtime=self._runtime,
                log_config={"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
                security_opt=["no-new-privileges:true"],
                ipc_mode="private",
            )
            made = client.create_container(
                recipe.image_id,
                entrypoint=[AGENT_IN_SANDBOX],
                command=[],
                hostname=recipe.hostname,
                environment=recipe.env,
                host_config=host,
                healthcheck={"test": ["NONE"]},
                labels={LABEL: self._owner, f"{LABEL}.sandbox": sandbox_id, f"{LABEL}.incarnation": incarnation},
                stdin_open=False,
                tty=False,
            )
        return str(made["Id"])

    def upper_of(self, container_id: str) -> tuple[Path, Path]:
        """(upper layer, merged root) of a container that exists."""
        data = self._inspect(container_id)["GraphDriver"]["Data"]
        return Path(data["UpperDir"]), Path(data["MergedDir"])

    def start(self, container_id: str) -> None:
        """Raises RestoreFailed with the engine's words."""
        with self._names_faults():
            try:
                self._client().start(container_id)
            except docker.errors.APIError as why:
                raise RestoreFailed(f"container {container_id[:12]} did not start: {why.explanation}") from why

    def life(self, container_id: str) -> Life:
        """Raises SandboxLost when the container does not run."""
        seen = self._inspect(container_id)
        state = seen["State"]
        if not state["Running"] or not state["Pid"]:
            raise SandboxLost(
                f"container {container_id[:12]} is {state['Status']} (exit code {state['ExitCode']}"
                f"{', out of memory' if state.get('OOMKilled') else ''})"
            )
        data = seen["GraphDriver"]["Data"]
        return Life(container_id, int(state["Pid"]), Path(data["UpperDir"]), Path(data["MergedDir"]))

    def why_dead(self, container_id: str) -> str:
        """For people: exit code and out-of-memory mark, as far as Docker still knows."""
        try:
            state = self._inspect(container_id)["State"]
        except SandboxLost as why:
            return str(why)
        return f"exit code {state['ExitCode']}{', out of memory' if state.get('OOMKilled') else ''}"

    def remove(self, container_id: str) -> None:
        """Kill and remove; gone already is fine."""
        with self._names_faults():
            try:
                self._client().remove_container(container_id, force=True, v=True)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as why:
                if why.status_code != 409:  # "removal ... is already in progress"
                    raise
        marks.forget(container_id)

    def ours(self) -> dict[str, str]:
        """Container id -> sandbox id of all containers of this root, running or not."""
        with self._names_faults():
            found = self._client().containers(all=True, filters={"label": f"{LABEL}={self._owner}"})
        return {row["Id"]: row["Labels"].get(f"{LABEL}.sandbox", "") for row in found}

    def everything(self) -> set[str]:
        """Ids of all containers of this Docker, whoever made them."""
        with self._names_faults():
            return {row["Id"] for row in self._client().containers(all=True)}

    def _inspect(self, container_id: str) -> dict[str, Any]:
        with self._names_faults():
            try:
                found: dict[str, Any] = self._client().inspect_container(container_id)
            except docker.errors.NotFound as why:
                raise SandboxLost(f"container {container_id[:12]} is gone") from why
        return found

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = docker.APIClient(base_url=self._url, timeout=120, version="auto")
        return client

    @contextmanager
    def _names_faults(self) -> Iterator[None]:
        try:
            yield
        except (requests.exceptions.RequestException, docker.errors.DockerException) as why:
            if isinstance(why, docker.errors.APIError):
                raise EngineFault(f"Docker refused: {why.explanation or why}") from why
            raise HostUnfit(
                f"Docker does not answer at {self._url}", remedy="start dockerd, or set envkeeper.docker"
            ) from why


class EngineFault(BelayerError):
    """Docker answered with an error that has no better name here."""
