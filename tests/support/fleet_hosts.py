"""Hosts of a fleet, each a real router in a network of its own (netlab), with recorded engines for workers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from belayer import fleet_keys
from belayer.messages.fleet import FleetStatus, FleetStatusReply, PeerView
from belayer.paths import Paths
from belayer.rpc import SyncClient
from tests.support.netlab import Net
from tests.support.router_host import TREE, RouterHost, config_text, write_record
from tests.support.wait import eventually

FLEET_PORT, HTTP_PORT = 7300, 8000
LOST_S = 5.0
TIMES = f"beat_s = 0.2\nslow_s = 1.5\nlost_s = {LOST_S}\norphan_s = 6.0\n"


@dataclass
class FleetHost(RouterHost):
    """``name``: its place in the net; ``host``: what its peers call it."""

    net: Net = field(kw_only=True)
    name: str = field(kw_only=True)
    host: str = field(kw_only=True)

    @property
    def url(self) -> str:
        return f"http://{self.net.hosts[self.name]}:{HTTP_PORT}"

    def fleet(self) -> FleetStatusReply:
        return self.rpc.call(FleetStatus(), FleetStatusReply, 300.0)

    def peer(self, host: str) -> PeerView:
        return next(peer for peer in self.fleet().peers if peer.host == host)

    def sees(self, host: str, state: str) -> PeerView:
        """Wait until it does; the very view in which it did."""
        seen: list[PeerView] = []

        def so() -> bool:
            seen[:] = [self.peer(host)]
            return seen[0].state == state

        eventually(so, what=f"{self.host} sees {host} {state}")
        return seen[0]

    def come_back(self) -> None:
        self.rpc.close()
        self.log.close()
        self.process, self.log = launch(self.net, self.name, self.root)
        eventually(self.answers, within=900, what=f"router is back; see {self.root}/router.log", every=0.1)
        self.rpc = SyncClient(Paths(self.root).router_sock)
        for fake in self.fakes:
            if fake.process.poll() is None and self.lives[fake.slot] == fake.generation:
                self.enroll(fake)

    def may_use(self, slot: str) -> None:
        """Wait until the remote slot is linked."""
        eventually(
            lambda: any(row.slot == slot and row.registered for row in self.status().slots),
            what=f"{self.host} may use {slot}; see {self.root}/router.log",
        )


def write_keys(roots: dict[str, Path]) -> dict[str, str]:
    """A pair for each host, and each host's public key in all folders. Host -> public key."""
    keys = {host: fleet_keys.make(root / "keys", host) for host, root in roots.items()}
    for own, root in roots.items():
        for host, key in keys.items():
            if host != own:
                fleet_keys.add(root / "keys", host, key)
    return keys


def fleet_section(host: str, address: str, peers: dict[str, str]) -> str:
    rows = "".join(f'[[peer]]\nname = "{name}"\naddress = "{where}:{FLEET_PORT}"\n' for name, where in peers.items())
    return f'[host]\nname = "{host}"\n[fleet]\nlisten = "{address}:{FLEET_PORT}"\n{TIMES}{rows}'


def launch(net: Net, name: str, root: Path) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    log = (root / "router.log").open("ab")
    command = [*net.prefix(name), sys.executable, "-m", "belayerd.router", "--config", str(Paths(root).config)]
    env = {**os.environ, "BELAYER_ROOT": str(root)}
    return subprocess.Popen(command, cwd=TREE, env=env, stdout=log, stderr=log), log


def prepare(
    net: Net, name: str, host: str, root: Path, peers: dict[str, str], slot: str = "", router: str = ""
) -> FleetHost:
    """Configure and start the router of a host; ``answers()`` says when it is up. ``slot``, ``router``: more of these
    sections."""
    address = net.hosts[name]
    paths = Paths(root).make()
    text = config_text(HTTP_PORT, ["s0"], f"request_deadline_s = 60.0\n{router}").replace("127.0.0.1", address)
    text = text.replace("max_model_len = 2048\n", f"max_model_len = 2048\n{slot}\n")
    paths.config.write_text(text + fleet_section(host, address, peers))
    record = write_record(root / "record.json")
    process, log = launch(net, name, root)
    return FleetHost(
        root, HTTP_PORT, process, log, record, SyncClient(paths.router_sock), net=net, name=name, host=host
    )
