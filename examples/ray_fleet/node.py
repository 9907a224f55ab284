"""One host of the fleet, on the node where this object lives. Nothing here needs Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from belayer import fleet_keys
from belayer.clock import monotonic
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.fleet import FleetStatus, FleetStatusReply
from belayer.rpc import call_sync


class Node:
    """``start`` once all keys are known; ``stop`` always. ``host``: where its clients find it; ``slot``: more lines of
    each [[slot]]."""

    def __init__(
        self, name: str, listen: str, root: Path, model: Path, slots: int, host: str = "127.0.0.1", slot: str = ""
    ) -> None:
        self._name, self._listen, self._model, self._slots = name, listen, model, slots
        self._address, self._slot = host, slot
        self._port = free_port()
        root.mkdir(parents=True, exist_ok=True)
        self.host = LocalHost(root, "")
        self._keys = root / "keys"
        if not (self._keys / f"{name}{fleet_keys.SECRET}").exists():
            fleet_keys.make(self._keys, name)

    def key(self) -> str:
        """The public key; the secret one never leaves this node."""
        return fleet_keys.load(self._keys, self._name).public.decode()

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._port}"

    def start(self, keys: dict[str, str], where: dict[str, str], daemons: tuple[str, ...] | None = None) -> None:
        """``keys`` and ``where``: public key and ADDRESS:PORT of every host. ``daemons``: all, or only these."""
        peers = ""
        for name in (one for one in keys if one != self._name):
            fleet_keys.add(self._keys, name, keys[name])
            peers += f'[[peer]]\nname = "{name}"\naddress = "{where[name]}"\n'
        fleet = f'[host]\nname = "{self._name}"\n[fleet]\nlisten = "{self._listen}"\n{peers}'
        fleet += "[envkeeper]\nenabled = false\n"
        self.host.paths.config.write_text(
            demo_config(self._model, self._port, self._slots, extra_slot=self._slot, extra=fleet, host=self._address)
        )
        self.host.start(daemons or ROLLOUT)

    def fleet(self, within_s: float = 60.0) -> dict[str, Any]:
        """The status of this host's fleet once all peers are up, or what it is after ``within_s``."""
        deadline, pause = monotonic() + within_s, threading.Event()
        while True:
            said = call_sync(self.host.paths.router_sock, FleetStatus(), FleetStatusReply)
            if all(peer.state == "up" for peer in said.peers) or monotonic() > deadline:
                return {"url": self.url, **msgspec.to_builtins(said)}
            pause.wait(0.2)

    def stop(self) -> None:
        self.host.stop()
