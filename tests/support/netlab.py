"""Hosts as network namespaces on one switch, itself a namespace, so that no rule of this machine's own network counts.

Each host has ``eth0``; the tests reach all of them by a link of their own. Needs root, as other tests here do.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class LateLink:
    """A wire of netlab that a process carries (late_link.py)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self._said, self._told = process.stdout, process.stdin
        assert self._said.readline() == "ready\n"

    def behave(self, to_host: dict[str, float] | None = None, to_net: dict[str, float] | None = None) -> dict[str, Any]:
        """``delay_ms``, ``jitter_ms``, ``loss`` (0 to 1) per direction; what is not named stays. Returns by direction
        how many frames were carried and lost so far."""
        self._told.write(json.dumps({"to_host": to_host or {}, "to_net": to_net or {}}) + "\n")
        self._told.flush()
        counts: dict[str, Any] = json.loads(self._said.readline())
        return counts

    def lost(self, direction: str) -> int:
        return int(self.behave()[direction][1])

    def close(self) -> None:
        self._told.close()
        self._process.wait(300)
        self._said.close()


@dataclass
class Net:
    """``name``: a few letters; interface names hold 15."""

    name: str = field(default_factory=lambda: f"b{os.getpid() % 100000}")
    hosts: dict[str, str] = field(default_factory=dict)  # host -> address

    def __post_init__(self) -> None:
        self.third = self._place()
        run("ip", "netns", "add", self.switch)
        self._switch("ip", "link", "add", "br0", "type", "bridge")
        self._switch("ip", "link", "set", "br0", "up")
        run("ip", "link", "add", f"{self.name}r", "type", "veth", "peer", "name", "root", "netns", self.switch)
        self._switch("ip", "link", "set", "root", "master", "br0", "up")
        run("ip", "addr", "add", f"{self.address(254)}/24", "dev", f"{self.name}r")
        run("ip", "link", "set", f"{self.name}r", "up")

    def _place(self) -> int:
        """A network that no other process has: both halves of the suite make one. Held by an abstract socket."""
        for third in range(20, 220):
            self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._held.bind(f"\0belayer-net-{third}")
            except OSError:
                self._held.close()
                continue
            return third
        raise AssertionError("200 networks of tests at once")

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def address(self, last: int) -> str:
        return f"10.213.{self.third}.{last}"

    def _switch(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.switch, *command)

    def inside(self, host: str, *command: str) -> str:
        return run(*self.prefix(host), *command)

    def prefix(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}-{host}"]

    def add(self, host: str, same_as: str = "") -> str:
        """A new host and its address; ``same_as``: with the address and hardware address of another, which must be
        unplugged first."""
        space = f"{self.name}-{host}"
        address = self.hosts[same_as] if same_as else self.address(len(self.hosts) + 1)
        self.hosts[host] = address  # first: what is known is taken away at the end, whatever comes between
        run("ip", "netns", "add", space)
        run(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            f"p-{host}",
            "netns",
            self.switch,
        )
        self._switch("ip", "link", "set", "dev", f"p-{host}", "master", "br0", "up")
        mac = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        self.inside(host, "ip", "link", "set", "eth0", "address", mac, "up")
        self.inside(host, "ip", "link", "set", "lo", "up")
        self.inside(host, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        return address

    def unplug(self, host: str) -> None:
        self._switch("ip", "link", "set", "dev", f"p-{host}", "down")
        assert "state DOWN" in self._switch("ip", "link", "show", "dev", f"p-{host}")

    def plug(self, host: str) -> None:
        self._switch("ip", "link", "set", "dev", f"p-{host}", "up")

    def drop(self, at: str, to: str) -> None:
        """Packets of host ``at`` to host ``to`` are lost; those of the other direction are not."""
        self.inside(at, "iptables", "-A", "OUTPUT", "-d", self.hosts[to], "-j", "DROP")

    def dropped(self, at: str) -> int:
        """How many packets that cost."""
        rows = self.inside(at, "iptables", "-L", "OUTPUT", "-v", "-n", "-x").splitlines()
        return sum(int(row.split()[0]) for row in rows if " DROP " in row)

    def heal(self, at: str) -> None:
        self.inside(at, "iptables", "-F", "OUTPUT")

    def throttle(self, at: str, rate: str) -> None:
        """All that host ``at`` sends goes through a queue of this rate: it comes late."""
        self.inside(
            at, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1600", "limit", "1m"
        )

    def free(self, at: str) -> None:
        self.inside(at, "tc", "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """What this thread starts now has the network of ``host``; all else stays that of this machine."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(path: str) -> None:
            with open(path) as space:
                if libc.setns(space.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns {path}")

        with open("/proc/thread-self/ns/net") as before:
            enter(f"/run/netns/{self.name}-{host}")
            try:
                yield
            finally:
                enter(f"/proc/self/fd/{before.fileno()}")

    @contextmanager
    def late(self, host: str) -> Iterator[LateLink]:
        """From now on the wire of ``host`` is one that can be late and lose frames, each direction by itself."""
        inner, outer = f"i-{host}", f"o-{host}"
        self._switch("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        for name in (inner, outer):
            self._switch("ip", "link", "set", "dev", name, "up")
        script = str(Path(__file__).with_name("late_link.py"))
        self.inside(host, sys.executable, script, "--plain", "eth0")
        for name in (inner, outer, f"p-{host}", "root"):
            self._switch(sys.executable, script, "--plain", name)
        for other in self.hosts:
            self.inside(other, sys.executable, script, "--plain", "eth0")
        run(sys.executable, script, "--plain", f"{self.name}r")
        self._switch("ip", "link", "set", "dev", f"p-{host}", "nomaster")
        self._switch("ip", "link", "set", "dev", outer, "master", "br0")
        command = ["ip", "netns", "exec", self.switch, sys.executable, script, f"p-{host}", inner]
        wire = LateLink(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        try:
            yield wire
        finally:
            wire.close()
            self._switch("ip", "link", "del", inner)
            self._switch("ip", "link", "set", "dev", f"p-{host}", "master", "br0", "up")

    def listening(self, host: str) -> set[tuple[str, int]]:
        """(address, port) of every TCP and UDP socket of that host that is not bound to its own loopback."""
        found = set()
        for row in self.inside(host, "ss", "-Hlntu").splitlines():
            address, _, port = row.split()[4].rpartition(":")
            if not address.strip("[]").startswith(("127.", "::1")):
                found.add((address, int(port)))
        return found

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", f"{self.name}-{host}"], check=False)
        subprocess.run(["ip", "link", "del", f"{self.name}r"], check=False)
        subprocess.run(["ip", "netns", "del", self.switch], check=False)
        self._held.close()
