"""A real envkeeper in its own root, for tests: started, watched, killed and always ended, with its containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker

from belayer.errors import BelayerError
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.sandbox import DestroySandbox, ListSandboxes, SandboxInfo, SandboxList
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from envkeeper.host import owner_of
from tests.support.wait import eventually

TREE = Path(__file__).parents[2]


@dataclass
class EnvHost:
    root: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    @classmethod
    def start(cls, root: Path, config: str = "") -> EnvHost:
        paths = Paths(root).make()
        paths.config.write_text(f"[envkeeper]\n{config}")
        log = (root / "envkeeper.log").open("ab")
        host = cls(root, _spawn(root, log), log)
        host.wait_ready()
        return host

    @property
    def paths(self) -> Paths:
        return Paths(self.root)

    def wait_ready(self) -> None:
        eventually(self.answers, within=60, what=f"envkeeper answers; see {self.root}/envkeeper.log", every=0.05)

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.root / "envkeeper.log").read_text()[-3000:]
        try:
            return call_sync(self.paths.envkeeper_sock, Ping(), Pong, 0.5).pid == self.process.pid
        except BelayerError:
            return False

    def create(self, name: str = "", **limits: float) -> Sandbox:
        return Sandbox.create(name=name, paths=self.paths, **limits)  # type: ignore[arg-type]

    def info(self, sandbox_id: str) -> SandboxInfo:
        listed = call_sync(self.paths.envkeeper_sock, ListSandboxes(), SandboxList)
        return next(row for row in listed.sandboxes if row.sandbox_id == sandbox_id)

    def listed(self) -> list[str]:
        listed = call_sync(self.paths.envkeeper_sock, ListSandboxes(), SandboxList)
        return [row.sandbox_id for row in listed.sandboxes]

    def destroy(self, sandbox_id: str) -> None:
        call_sync(self.paths.envkeeper_sock, DestroySandbox(sandbox_id=sandbox_id), Done, 60)

    def kill(self) -> None:
        """SIGKILL to the daemon, and proof that it is gone."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(10) == -signal.SIGKILL

    def restart(self) -> None:
        assert self.process.poll() is not None
        self.process = _spawn(self.root, self.log)
        self.wait_ready()

    def containers(self) -> list[str]:
        client = docker.APIClient()
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
                self.process.wait(10)
        self.log.close()
        client = docker.APIClient()
        try:
            for container_id in self.containers():
                client.remove_container(container_id, force=True, v=True)
        finally:
            client.close()


def _spawn(root: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "BELAYER_ROOT": str(root)}
    return subprocess.Popen([sys.executable, "-m", "envkeeper"], cwd=TREE, env=env, stdout=log, stderr=log)
