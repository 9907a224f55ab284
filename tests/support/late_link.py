"""A wire that is late and lossy, in user space: the kernel that the tests run on has no netem.

``python tests/support/late_link.py HOST_SIDE NET_SIDE``, inside the switch's namespace: every frame that comes in at
one of the two interfaces leaves at the other after its delay, or never. What each direction does is told on standard
input, a JSON line each time: ``{"to_host": {"delay_ms": 200, "jitter_ms": 50, "loss": 0.1}, "to_net": {...}}``. After
each, the number of frames carried and lost so far comes back on standard output.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import json
import random
import select
import socket
import struct
import sys
import time

_SIOCETHTOOL = 0x8946
_OFF = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO: frames come here whole and with their checksums
_ALL = 0x0003  # ETH_P_ALL


def plain(name: str) -> None:
    """No offload at this interface: what would be left to a card that does not exist would be wrong on our wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFF:
            value = array.array("B", struct.pack("II", command, 0))
            address, _ = value.buffer_info()
            try:
                fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", name.encode(), address))
            except OSError as why:
                sys.exit(f"{name}: offload {command:#x} cannot be switched off: {why}")


class Direction:
    def __init__(self, source: socket.socket, target: socket.socket, seed: int) -> None:
        self.source, self._target, self._draw = source, target, random.Random(seed)
        self.delay_ms = self.jitter_ms = self.loss = 0.0
        self.carried = self.lost = 0
        self._due: list[tuple[float, int, bytes]] = []

    def take(self) -> None:
        frame, said = self.source.recvfrom(65535)
        if said[2] == socket.PACKET_OUTGOING:
            return
        if self._draw.random() < self.loss:
            self.lost += 1
            return
        late = self.delay_ms + self._draw.uniform(0, self.jitter_ms)
        heapq.heappush(self._due, (time.monotonic() + late / 1e3, self.carried, frame))
        self.carried += 1

    def send(self) -> float:
        """What is due; seconds until more is."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            self._target.send(heapq.heappop(self._due)[2])
        return self._due[0][0] - now if self._due else 1.0


def main(host_side: str, net_side: str) -> None:
    ends = []
    for name in (host_side, net_side):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        end.bind((name, 0))
        ends.append(end)
    ways = {"to_net": Direction(ends[0], ends[1], 1), "to_host": Direction(ends[1], ends[0], 2)}
    print("ready", flush=True)
    while True:
        wait = min(max(0.0, way.send()) for way in ways.values())
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait)
        for way in ways.values():
            if way.source in ready:
                way.take()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            for name, wanted in json.loads(line).items():
                for key, value in wanted.items():
                    setattr(ways[name], key, value)
            print(json.dumps({name: [way.carried, way.lost] for name, way in ways.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--plain":
        plain(sys.argv[2])
    else:
        main(*sys.argv[1:])
