"""Docker, as little of it as a sandbox needs: create, start, look, kill, remove. Blocking; run in threads.

Sandboxes are sealed by what is asked for here (promise E7): no network unless named, nothing of the host mounted but
the agent (read-only), a fixed host name (the restored processes keep the old one), no health check (it would run
programs at random moments), no restart policy and no auto-removal (a life ends once, by our hand or seen by us), and
no docker-init: its containers dump but do not restore.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer.errors import BelayerError, HostUnfit, Refused, RestoreFailed, SandboxLost
from envkeeper import admission, hung, limits, lives, marks, network, passing, seccomp
from envkeeper.docker_port import GLANCE_S, TIMEOUT_S, DockerPort, EngineAway, EngineFault
from envkeeper.recipe import Recipe

AGENT_IN_SANDBOX = "/.belayer/agent"
LABEL = "belayer"
BOUND = frozenset({AGENT_IN_SANDBOX, lives.IN_SANDBOX, "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"})
_LOOKS, _LOOK_S = 100, 0.05  # at a death that Docker has not heard of yet
_REMOVALS, _REMOVAL_S = 6, 0.2  # tries, and between them: what lingers is a matter of a moment


@dataclass(frozen=True, slots=True)
class Life:
    """A running container: what a checkpoint must know before it freezes (Docker may hold its lock meanwhile)."""

    container_id: str
    pid: int
    upper: Path
    merged: Path
    holder_pid: int = 0  # of the container that holds its network, 0 for none


class Engine:
    """``url``: Docker's socket. ``runtime``: the name under which our OCI runtime is registered. ``owner``: label
    value that tells this root's containers from those of another envkeeper on the same host. ``bridge``: the Docker
    network of holders."""

    def __init__(self, url: str, runtime: str, owner: str, bridge: str = "bridge") -> None:
        self._docker, self._runtime, self._owner, self._bridge = DockerPort(url), runtime, owner, bridge

    def check(self) -> dict[str, str]:
        """Versions; raises HostUnfit with the remedy when Docker is not there or lacks what we need."""
        with self._docker.reading("for its version"):
            info = self._docker.client().info()
            version = self._docker.client().version()
            parts = {part["Name"]: part["Version"] for part in version.get("Components", [])}
            found = {
                "docker": version["Version"],
                "containerd": parts.get("containerd", ""),
                "runc": parts.get("runc", ""),
                "kernel": info.get("KernelVersion", ""),
                "storage": str(info.get("Driver")),
                "cgroup": str(info.get("CgroupVersion", "1")),
                "live_restore": str(info.get("LiveRestoreEnabled", False)),
                "data_root": info.get("DockerRootDir", ""),
            }
            runtimes = info.get("Runtimes", {})
        if found["storage"] != "overlay2":
            raise HostUnfit(
                f"Docker uses the storage driver {found['storage']}; upper layers are copied raw from overlay2",
                remedy='set "storage-driver": "overlay2" in /etc/docker/daemon.json',
            )
        if self._runtime not in runtimes:
            raise HostUnfit(
                f"Docker does not know the runtime {self._runtime}",
                remedy=f'add "runtimes": {{"{self._runtime}": {{"path": "/opt/belayer/bin/belayer-runtime"}}}} to '
                "/etc/docker/daemon.json and reload dockerd",
            )
        return found

    def image_id(self, name: str) -> str:
        """Content id of the image that has this name now, "" when none has."""
        return str(found[0]) if (found := self._image(name)) else ""

    def pin(self, image: str) -> tuple[str, str]:
        """(content id of ``image``, the user that it names). Raises HostUnfit when it is not here, or when what it
        asks for cannot be checkpointed (volumes live outside of the upper layer). Its health check, entry point and
        command are not used."""
        found = self._image(image)
        if found is None:
            raise HostUnfit(f"no image {image} in this Docker", remedy="run `make setup`, or docker load it")
        image_id, user, volumes = found
        if volumes:
            raise HostUnfit(
                f"image {image} declares volumes ({volumes}): their content is in no checkpoint",
                remedy="build it without VOLUME",
            )
        return image_id, user

    def _image(self, name: str) -> tuple[str, str, str] | None:
        """(content id, user, volumes) of an image, None when this Docker has none of that name."""
        try:
            with self._docker.reading(f"for image {name}"):
                found = self._docker.client().inspect_image(name)
                config = found.get("Config") or {}
                return str(found["Id"]), str(config.get("User") or ""), ", ".join(config.get("Volumes") or ())
        except EngineFault as why:
            if why.status == 404:
                return None
            if why.status == 400:  # asked again it says the same
                raise HostUnfit(f"image {name}: {why.said}", remedy="set envkeeper.image") from why
            raise

    def create(self, recipe: Recipe, sandbox_id: str, incarnation: str, told: Path | None = None) -> str:
        """A created, not started container; its id. ``told``: the folder of envkeeper.lives for this life. With an
        allow-list its holder is made, or made again, first."""
        holder = self.holder(sandbox_id, recipe) if recipe.allow else ""
        binds = {recipe.agent: {"bind": AGENT_IN_SANDBOX, "mode": "ro"}}
        if told is not None:
            binds[str(told)] = {"bind": lives.IN_SANDBOX, "mode": "ro"}
        with self._docker.reading("to create a container"):
            client = self._docker.client()
            host = client.create_host_config(
                network_mode=f"container:{holder}" if holder else "none",
                mem_limit=limits.memory(recipe),
                memswap_limit=limits.memory(recipe),
                cpu_period=limits.PERIOD_US,
                cpu_quota=limits.quota_us(recipe),
                pids_limit=recipe.pids,
                binds=binds,
                ipc_mode="private",
                # With the network of others to write into, raw sockets are no longer its own affair.
                cap_drop=["AUDIT_WRITE", "NET_RAW"] if holder else ["AUDIT_WRITE"],
                sysctls=None if holder else _loopback(),
                **self._sealed(),
            )
            made = client.create_container(
                recipe.image_id,
                entrypoint=[AGENT_IN_SANDBOX],
                command=[],
                user="0:0",  # the agent's; actions run as the image's user, or as the one that they name
                hostname=None if holder else recipe.hostname,  # it shares the holder's, which has this name
                environment=recipe.env,
                host_config=host,
                healthcheck={"test": ["NONE"]},
                labels=self._labels(sandbox_id, "sandbox", incarnation) | dict(recipe.labels),
                stdin_open=False,
                tty=False,
            )
            container_id = str(made["Id"])
        marks.born(container_id, self._owner)
        return container_id

    def holder(self, sandbox_id: str, recipe: Recipe) -> str:
        """Id of the running holder of this sandbox, with its rules written and read back. Raises HostUnfit."""
        found = [row for row in self._ours() if _is_holder(row, sandbox_id)]
        for row in found:
            pid = self._pid(row["Id"])
            if pid:
                network.close(pid, recipe.allow)
                return str(row["Id"])
            self.remove(row["Id"])
        with self._docker.reading("to create a holder"):
            client = self._docker.client()
            made = client.create_container(
                recipe.image_id,
                entrypoint=[AGENT_IN_SANDBOX, "hold"],
                command=[],
                user="65534:65534",
                hostname=recipe.hostname,
                environment={},
                host_config=client.create_host_config(
                    network_mode=self._bridge,
                    dns=network.resolvers(recipe.allow),
                    mem_limit=16 << 20,
                    memswap_limit=16 << 20,
                    pids_limit=8,
                    binds={recipe.agent: {"bind": AGENT_IN_SANDBOX, "mode": "ro"}},
                    cap_drop=["ALL"],
                    **self._sealed(),
                ),
                healthcheck={"test": ["NONE"]},
                labels=self._labels(sandbox_id, "holder"),
            )
            container_id = str(made["Id"])
            client.start(container_id)  # nothing of the sandbox is in it yet: it may be open until the next line
        try:
            network.close(self._pid(container_id), recipe.allow)
        except BelayerError:
            self.remove(container_id)
            raise
        return container_id

    def remove_holders(self, sandbox_id: str) -> None:
        for row in self._ours():
            if _is_holder(row, sandbox_id):
                self.remove(row["Id"])

    def _pid(self, container_id: str) -> int:
        try:
            with self._docker.reading("for a pid"):
                return int(self._inspect(container_id)["State"]["Pid"])
        except SandboxLost:
            return 0

    def _sealed(self) -> dict[str, Any]:
        return {
            "runtime": self._runtime,
            "log_config": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "security_opt": ["no-new-privileges:true", f"seccomp={seccomp.profile()}"],
        }

    def _labels(self, sandbox_id: str, role: str, incarnation: str = "") -> dict[str, str]:
        ours = {LABEL: self._owner, f"{LABEL}.sandbox": sandbox_id, f"{LABEL}.role": role}
        return ours | ({f"{LABEL}.incarnation": incarnation} if incarnation else {})

    def upper_of(self, container_id: str) -> tuple[Path, Path]:
        """(upper layer, merged root) of a container that exists."""
        with self._docker.reading("for a layer"):
            return _layers(self._inspect(container_id))

    def start(self, container_id: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises RestoreFailed with the engine's words; Hindered where they are not about what is being started, and
        where a restore was not over in time: its runc and CRIU are killed then."""
        try:
            with self._docker.reading("to start a container"):
                self._docker.client(timeout_s).start(container_id)
        except EngineAway as why:
            if not why.late or not (ended := hung.end_restore(container_id)):
                raise
            raise passing.hung(container_id, timeout_s, ended) from why
        except EngineFault as why:
            kind = RestoreFailed if passing.of_criu(why.said) else passing.Hindered
            raise kind(f"container {container_id[:12]} did not start: {why.said or why.message}") from why

    def life(self, container_id: str) -> Life:
        """Raises SandboxLost when the container does not run."""
        with self._docker.reading("for a container"):
            seen = self._inspect(container_id)
            state = seen["State"]
            if not state["Running"] or not state["Pid"]:
                raise SandboxLost(
                    f"container {container_id[:12]} is {state['Status']} (exit code {state['ExitCode']}"
                    f"{', out of memory' if state.get('OOMKilled') else ''})"
                )
            holder, pid = self._holder_of(seen), int(state["Pid"])
            self._admit(seen, pid, holder)
            return Life(container_id, pid, *_layers(seen), self._pid(holder) if holder else 0)

    def _holder_of(self, seen: dict[str, Any]) -> str:
        """Id of the holder whose network a container shares; "" when it shares none, or that of a stranger."""
        mode = str(seen["HostConfig"].get("NetworkMode") or "")
        holder = mode.removeprefix("container:") if mode.startswith("container:") else ""
        if not holder:
            return ""
        labels = self._inspect(holder)["Config"]["Labels"] or {}
        ours = labels.get(LABEL) == self._owner and labels.get(f"{LABEL}.role") == "holder"
        return holder if ours else ""

    def _admit(self, seen: dict[str, Any], pid: int, holder: str) -> None:
        """Raises Refused with every name of what the life cannot keep (promises E4, E7)."""
        try:
            inside = admission.look(pid)
        except (FileNotFoundError, ProcessLookupError) as why:
            raise SandboxLost(f"container {seen['Id'][:12]} ended at once") from why
        found = admission.check(seen, inside, runtime=self._runtime, bound=BOUND, holder=holder)
        if found:
            raise Refused(
                f"container {seen['Id'][:12]} cannot be a sandbox: {'; '.join(map(str, found))}",
                remedy="see docs/operations.md, sandboxes",
            )

    def why_dead(self, container_id: str) -> str:
        """For people: exit code and out-of-memory mark, as far as Docker still knows. Never raises what Docker does:
        the death is known, and must be told."""
        try:
            with self._docker.reading("why a container died"):
                state = self._ended(container_id)
                if state["Running"]:
                    return "its end is not known there yet"
                return f"exit code {state['ExitCode']}{', out of memory' if state.get('OOMKilled') else ''}"
        except BelayerError as why:
            return why.message

    def _ended(self, container_id: str) -> dict[str, Any]:
        """What Docker says of its end. The kernel tells us of a death some milliseconds before Docker knows; until then
        it says that the container runs and that its exit code is 0."""
        state: dict[str, Any] = self._inspect(container_id, GLANCE_S)["State"]
        for _ in range(_LOOKS):
            if not state["Running"]:
                break
            time.sleep(_LOOK_S)
            state = self._inspect(container_id, GLANCE_S)["State"]
        return state

    def remove(self, container_id: str) -> None:
        """Kill and remove; gone already is fine."""
        for left in reversed(range(_REMOVALS)):
            try:
                with self._docker.reading("to remove a container"):
                    self._docker.client().remove_container(container_id, force=True, v=True)
                break
            except EngineFault as why:
                if why.status in (404, 409):  # 409: "removal ... is already in progress"
                    break
                # It died between Docker's look and Docker's kill (we have just fenced it), or is not unmounted yet.
                if left == 0 or not passing.lingers(why.said):
                    raise
                time.sleep(_REMOVAL_S)
        marks.forget(container_id)

    def unmake(self, container_id: str) -> None:
        """``remove``, of one whose restore may still be under way, or hang: Docker would wait for its end."""
        hung.end_restore(container_id)
        self.remove(container_id)

    def ours(self) -> dict[str, str]:
        """Container id -> sandbox id of all containers of this root, running or not. A holder has the id of its
        sandbox behind a "+"."""
        with self._docker.reading("for its containers"):
            return {row["Id"]: ("+" if _is_holder(row) else "") + row["Labels"].get(f"{LABEL}.sandbox", "")
                    for row in self._ours()}  # fmt: skip

    def _ours(self) -> list[dict[str, Any]]:
        with self._docker.reading("for its containers"):
            found = self._docker.client().containers(all=True, filters={"label": f"{LABEL}={self._owner}"})
            return [{"Id": str(row["Id"]), "Labels": dict(row["Labels"])} for row in found]

    def _inspect(self, container_id: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        try:
            with self._docker.reading("for a container"):
                found = self._docker.client(timeout_s).inspect_container(container_id)
                if found["Id"] != container_id:
                    raise ValueError(f"it is about {found['Id']}")
                return dict(found)
        except EngineFault as why:
            if why.status == 404:
                raise SandboxLost(f"container {container_id[:12]} is gone") from why
            raise


def _layers(seen: dict[str, Any]) -> tuple[Path, Path]:
    data = seen["GraphDriver"]["Data"]
    return Path(data["UpperDir"]), Path(data["MergedDir"])


def _is_holder(row: dict[str, Any], sandbox_id: str = "") -> bool:
    labels = row["Labels"]
    return labels.get(f"{LABEL}.role") == "holder" and sandbox_id in ("", labels.get(f"{LABEL}.sandbox"))


def _loopback() -> dict[str, str]:
    """Docker takes ::1 away where it sets up no network; programs look for it, and a restored life has one."""
    return {"net.ipv6.conf.all.disable_ipv6": "0"} if Path("/proc/sys/net/ipv6").exists() else {}
