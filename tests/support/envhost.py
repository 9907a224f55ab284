"""A real envkeeper in its own root, for tests: started, watched, killed and always ended, with its containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import docker
import docker.errors
import requests

from belayer.errors import BelayerError
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.sandbox import DestroySandbox, ListSandboxes, SandboxInfo, SandboxList
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from envkeeper import marks
from envkeeper.host import owner_of
from tests.support.wait import eventually

TREE = Path(__file__).parents[2]
_DOCKER_S = 300  # for one answer of a Docker that has much to do


@dataclass
class EnvHost:
    root: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    docker: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls, root: Path, config: str = "", docker: str | None = None, env: dict[str, str] | None = None
    ) -> EnvHost:
        """``docker``: url of another Docker than the host's; ``env``: more environment for the daemon."""
        paths = Paths(root).make()
        url = f'docker = "{docker}"\n' if docker else ""
        paths.config.write_text(f"[envkeeper]\n{url}{config}")
        log = (root / "envkeeper.log").open("ab")
        host = cls(root, _spawn(root, log, env or {}), log, docker, env or {})
        host.wait_ready()
        return host

    @property
    def paths(self) -> Paths:
        return Paths(self.root)

    def wait_ready(self) -> None:
        try:
            eventually(self.answers, what="envkeeper answers", every=0.05)
        except AssertionError as late:
            raise AssertionError(f"{late}; its last words: {self.tail()}") from late

    def answers(self) -> bool:
        assert self.process.poll() is None, self.tail()
        try:
            return call_sync(self.paths.envkeeper_sock, Ping(), Pong, 5.0).pid == self.process.pid
        except BelayerError:
            return False

    def create(self, name: str = "", **limits: float) -> Sandbox:
        return Sandbox.create(name=name, paths=self.paths, **limits)  # type: ignore[arg-type]

    def info(self, sandbox_id: str) -> SandboxInfo:
        listed = call_sync(self.paths.envkeeper_sock, ListSandboxes(), SandboxList, 60.0)
        return next(row for row in listed.sandboxes if row.sandbox_id == sandbox_id)

    def listed(self) -> list[str]:
        listed = call_sync(self.paths.envkeeper_sock, ListSandboxes(), SandboxList, 60.0)
        return [row.sandbox_id for row in listed.sandboxes]

    def destroy(self, sandbox_id: str) -> None:
        call_sync(self.paths.envkeeper_sock, DestroySandbox(sandbox_id=sandbox_id), Done, 300)

    def kill(self) -> None:
        """SIGKILL to the daemon, and proof that it is gone by that."""
        self.process.send_signal(signal.SIGKILL)
        code = self.process.wait(120)
        assert code == -signal.SIGKILL, f"it had ended by itself with {code}: {self.tail()}"

    def tail(self) -> str:
        """The last words of the daemon."""
        return (self.root / "envkeeper.log").read_text(errors="replace")[-4000:]

    def restart(self) -> None:
        assert self.process.poll() is not None
        self.process = _spawn(self.root, self.log, self.env)
        self.wait_ready()

    def containers(self) -> list[str]:
        client = docker.APIClient(self.docker, timeout=_DOCKER_S)
        try:
            found = client.containers(all=True, filters={"label": f"belayer={owner_of(self.paths)}"})
        finally:
            client.close()
        return [row["Id"] for row in found]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(120)
        self.log.close()
        said = [""]
        try:
            eventually(lambda: self._emptied(said), what=f"no container of {self.root} is left")
        except AssertionError as late:
            raise AssertionError(f"{late}; Docker's last words: {said[-1]}") from late

    def _emptied(self, said: list[str]) -> bool:
        """Removes what is there. Docker may be about to do the same, on the word of a daemon that is dead now; what it
        answers instead is put to ``said``."""
        client = docker.APIClient(self.docker, timeout=_DOCKER_S)
        try:
            for container_id in self.containers():
                try:
                    client.remove_container(container_id, force=True, v=True)
                except (docker.errors.APIError, requests.exceptions.RequestException) as why:
                    said.append(str(why))
                marks.forget(container_id)
        finally:
            client.close()
        return not self.containers()


def _spawn(root: Path, log: IO[bytes], more: dict[str, str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, **more, "BELAYER_ROOT": str(root)}
    return subprocess.Popen([sys.executable, "-m", "envkeeper"], cwd=TREE, env=env, stdout=log, stderr=log)
