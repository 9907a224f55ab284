"""GPU memory made by a child that ends at once: the owner itself never loads the CUDA driver.

``python -m gpuowner.backends.oneshot CHANNEL SPEC DEVICE NBYTES...`` makes one allocation per size, sends one packet
(JSON, with a descriptor per allocation) on the descriptor CHANNEL, and exits 0. Exit 2: this host cannot, the sentence
is on stderr.

That an exported descriptor keeps the memory when the process that made it is gone is documented (cuda.h,
cuMemExportToShareableHandle) and read in the open kernel module; stage T1 of the H200 check is to show it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from belayer.errors import BelayerError, HostUnfit, Refused
from belayer.seqpacket import recv_fds
from gpuowner.backends.driver import driver_for

_TREE = str(Path(__file__).resolve().parents[2])
_MOST = 64  # allocations per child; the kernel carries at most 253 descriptors in a packet
_DEADLINE_S = 60.0  # cuInit of a machine with many GPUs takes seconds


@dataclass(frozen=True)
class Made:
    """What one child made, in the order that was asked for. The caller owns the descriptors."""

    device: str
    granularity: int
    fds: tuple[int, ...]
    sizes: tuple[int, ...]


def make(spec: str, device: int, sizes: tuple[int, ...]) -> Made:
    """Raises HostUnfit (no driver, no device), Refused (no room; the driver's own name for it is in the message).
    Without sizes it only finds out whether this host could."""
    if len(sizes) > _MOST or any(nbytes <= 0 for nbytes in sizes):
        raise Refused(f"{len(sizes)} allocations of {sizes} bytes", remedy=f"at most {_MOST} of more than 0 bytes")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = _start(theirs.fileno(), [spec, str(device), *map(str, sizes)])
        try:
            return _receive(ours, child, len(sizes))
        finally:
            child.kill()  # has ended by now, or is past its deadline
            child.wait()
            assert child.stderr is not None
            child.stderr.close()


def _start(channel: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpuowner.backends.oneshot", str(channel), *arguments],
        pass_fds=(channel,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_TREE, os.environ.get("PYTHONPATH"))))},
    )


def _receive(ours: socket.socket, child: subprocess.Popen[bytes], count: int) -> Made:
    ours.settimeout(_DEADLINE_S)
    try:
        data, fds, _ = recv_fds(ours, 1 << 16, max(count, 1))
    except TimeoutError as why:
        raise HostUnfit(f"the child that allocates GPU memory did not answer in {_DEADLINE_S:g} s") from why
    if not data:
        raise _said(child)
    told = json.loads(data)
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise Refused(f"the child sent {len(fds)} descriptors for {count} allocations", kept="nothing was allocated")
    # Its exit comes before anything is used: what we hold must not depend on a process that might still be there.
    child.wait(_DEADLINE_S)
    return Made(told["device"], told["granularity"], tuple(fds), tuple(told["sizes"]))


def _said(child: subprocess.Popen[bytes]) -> BelayerError:
    assert child.stderr is not None
    words = child.stderr.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    code = child.wait(_DEADLINE_S)
    kind = HostUnfit if code == 2 else Refused
    return kind(f"no GPU memory (allocating child, exit {code}): {words[-1]}")


def _run(channel: int, spec: str, device: int, wanted: tuple[int, ...]) -> None:
    driver = driver_for(spec)
    driver.init()
    grain = driver.granularity(device)
    sizes = tuple(-(-nbytes // grain) * grain for nbytes in wanted)
    handles = [driver.create(device, nbytes) for nbytes in sizes]
    fds = [driver.export_fd(handle) for handle in handles]
    if driver.has_context(device):
        raise Refused("a context was made where none is needed", remedy="the driver behaves otherwise than cuda.h says")
    told = {"device": driver.uuid(device), "granularity": grain, "sizes": sizes}
    with socket.socket(fileno=channel) as out:
        socket.send_fds(out, [json.dumps(told).encode()], fds)


def main() -> NoReturn:
    channel, spec, device, *sizes = sys.argv[1:]
    try:
        _run(int(channel), spec, int(device), tuple(map(int, sizes)))
    except HostUnfit as why:
        print(why, file=sys.stderr)
        sys.exit(2)
    except BelayerError as why:
        print(why, file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
