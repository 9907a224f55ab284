"""A Docker of the test's own (dockerd and containerd apart), so that either can be killed at will.

Own data root, exec root, socket and pid files below one folder; nothing of the host's Docker is touched. ``binaries``
puts another Docker's programs first on PATH (for example an unpacked Docker 28).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import docker
import docker.errors
import requests

from tests.support.wait import eventually, remove_tree

RUNTIME = Path("/opt/belayer/bin/belayer-runtime")


@dataclass
class PrivateDocker:
    """``root`` must be short (unix sockets) and on the file system that holds the checkpoints."""

    root: Path
    binaries: Path | None = None
    runtime: Path = RUNTIME
    extra: dict[str, object] = field(default_factory=dict)
    dockerd: subprocess.Popen[bytes] | None = None
    containerd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.root}/d.sock"

    @property
    def _address(self) -> Path:
        return self.root / "c.sock"

    def start(self) -> PrivateDocker:
        (self.root / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_config()
        self.start_containerd()
        self.start_dockerd()
        return self

    def start_containerd(self) -> None:
        self.containerd = self._spawn("containerd", "--config", str(self.root / "containerd.toml"))
        self._wait(self._serves, "containerd")

    def start_dockerd(self) -> None:
        (self.root / "d.pid").unlink(missing_ok=True)  # a killed dockerd leaves it, and a new one then refuses
        self.dockerd = self._spawn(
            "dockerd", "--config-file", str(self.root / "daemon.json"), "--containerd", str(self._address)
        )
        self._wait(self.answers, "dockerd")

    def mend(self) -> None:
        """Start again what does not run."""
        if self.containerd is None or self.containerd.poll() is not None:
            self.start_containerd()
        if self.dockerd is None or self.dockerd.poll() is not None:
            self.start_dockerd()

    def _wait(self, probe: Callable[[], bool], program: str) -> None:
        try:
            eventually(probe, what=f"{program} answers", every=0.05)
        except AssertionError as late:
            raise AssertionError(f"{late}; its last words: {self.tail(program)}") from late

    def tail(self, program: str) -> str:
        return (self.root / f"{program}.log").read_text(errors="replace")[-3000:]

    def _serves(self) -> bool:
        """Its socket is there long before anybody is served."""
        assert self.containerd is not None
        assert self.containerd.poll() is None, self.tail("containerd")
        ask = [self._program("ctr"), "--address", str(self._address), "--connect-timeout", "1s", "version"]
        return subprocess.run(ask, capture_output=True, check=False, timeout=300).returncode == 0

    def client(self) -> docker.APIClient:
        return docker.APIClient(base_url=self.url, timeout=300, version="auto")

    def answers(self) -> bool:
        assert self.dockerd is not None
        assert self.dockerd.poll() is None, self.tail("dockerd")
        try:
            client = docker.APIClient(base_url=self.url, timeout=30, version="1.40")
            try:
                return bool(client.ping())
            finally:
                client.close()
        except (docker.errors.DockerException, requests.exceptions.RequestException):
            return False

    def wait_runs(self, image: str) -> None:
        """It runs a container of ``image``: a dockerd whose containerd was away answers long before it can."""
        said = [""]
        try:
            eventually(lambda: self._runs(image, said), what="Docker runs containers again", every=0.1)
        except AssertionError as late:
            raise AssertionError(f"{late}; Docker's last words: {said[-1]}") from late

    def _runs(self, image: str, said: list[str]) -> bool:
        client = self.client()
        try:
            made = client.create_container(image, entrypoint=["/bin/true"], network_disabled=True)["Id"]
            try:
                client.start(made)
                return int(client.wait(made, timeout=30)["StatusCode"]) == 0
            finally:
                client.remove_container(made, force=True)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as why:
            said.append(str(why))
            return False
        finally:
            client.close()

    def take_image(self, name: str) -> None:
        """Copy an image of the host's Docker into this one, through a pipe."""
        save = subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE)
        load = ["docker", "-H", self.url, "load", "-q"]
        done = subprocess.run(load, stdin=save.stdout, check=False, capture_output=True, text=True)
        assert save.wait(300) == 0, f"the host's Docker did not give {name}"
        assert done.returncode == 0, done.stderr

    def kill_dockerd(self) -> None:
        """SIGKILL, and proof. Containers and their shims live on (live-restore)."""
        self._kill(self.dockerd)

    def kill_containerd(self) -> None:
        self._kill(self.containerd)
        self._address.unlink(missing_ok=True)

    def shims(self) -> dict[str, int]:
        """Container id -> pid of its containerd-shim."""
        out = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"containerd-shim" in words[0] and os.fsencode(self._address) in words:
                    out[words[words.index(b"-id") + 1].decode()] = int(folder.name)
        return out

    def pids(self) -> list[int]:
        """Every process of this Docker: daemons, shims and what they hold."""
        daemons = [child.pid for child in (self.dockerd, self.containerd) if child is not None and child.poll() is None]
        return [*daemons, *self.shims().values()]

    def mounts(self) -> list[str]:
        rows = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return [point for point in rows if point.startswith(f"{self.root}/")]

    def stop(self) -> None:
        """End everything of this Docker; its folder is empty afterwards."""
        if all(child is not None and child.poll() is None for child in (self.dockerd, self.containerd)):
            said = [""]
            try:
                eventually(lambda: self._emptied(said), what="its containers are removed", every=0.2)
            except AssertionError as late:
                raise AssertionError(f"{late}; Docker's last words: {said[-1]}") from late
        for child in (self.dockerd, self.containerd):
            if child is not None and child.poll() is None:
                child.terminate()
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait(120)
        for pid in self.shims().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.shims(), what="its shims are dead")
        eventually(self._unmounted, what=f"nothing is mounted below {self.root}")
        remove_tree(self.root)

    def _emptied(self, said: list[str]) -> bool:
        """A container that is dying, or whose root is mounted a moment longer, is removed the next time."""
        client = self.client()
        try:
            for row in client.containers(all=True):
                client.remove_container(row["Id"], force=True, v=True)
            return not client.containers(all=True)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as why:
            said.append(str(why))
            return False
        finally:
            client.close()

    def _unmounted(self) -> bool:
        """What a shim unmounts in its last moment is no mount any more when it is its turn here."""
        for point in sorted(self.mounts(), reverse=True):
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)
        return not self.mounts()

    def _spawn(self, program: str, *args: str) -> subprocess.Popen[bytes]:
        found = self._program(program)
        env = {**os.environ, "PATH": self._path(), "TMPDIR": str(self.root / "tmp")}
        # In a network namespace of its own: a dockerd without a bridge removes the host's docker0 when it starts.
        apart = ["unshare", "--net"] if program == "dockerd" else []
        with (self.root / f"{program}.log").open("ab") as log:
            return subprocess.Popen([*apart, found, *args], env=env, stdout=log, stderr=log, start_new_session=True)

    def _path(self) -> str:
        return os.environ["PATH"] if self.binaries is None else f"{self.binaries}:{os.environ['PATH']}"

    def _program(self, name: str) -> str:
        found = shutil.which(name, path=self._path())
        assert found, f"no {name} on {self._path()}"
        return found

    def _write_config(self) -> None:
        toml = f'version = 2\nroot = "{self.root}/cr"\nstate = "{self.root}/cs"\n'
        toml += 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        toml += f'[grpc]\naddress = "{self._address}"\n'
        (self.root / "containerd.toml").write_text(toml)
        config: dict[str, object] = {
            "data-root": f"{self.root}/data",
            "exec-root": f"{self.root}/x",
            "pidfile": f"{self.root}/d.pid",
            "hosts": [self.url],
            "bridge": "none",
            "iptables": False,
            "live-restore": True,
            "storage-driver": "overlay2",
            "log-driver": "json-file",
            "runtimes": {"belayer": {"path": str(self.runtime)}},
        }
        (self.root / "daemon.json").write_text(json.dumps(config | self.extra))

    @staticmethod
    def _kill(child: subprocess.Popen[bytes] | None) -> None:
        assert child is not None
        child.send_signal(signal.SIGKILL)
        assert child.wait(120) == -signal.SIGKILL
