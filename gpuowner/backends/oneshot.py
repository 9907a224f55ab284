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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from belayer.errors import BelayerError, HostUnfit, Refused
from belayer.seqpacket import recv_fds
from gpuowner.backends.driver import driver_for

_TREE = str(Path(__file__).resolve().parents[2])
_MOST = 64  # allocations per child; the kernel carries at most 253 descriptors in a packet
_CHILDREN = {
    "gpuowner.backends.upload": "GPU memory was not filled (uploading child",
    "gpuowner.backends.device_memory": "GPU memory was not read (verifying child",
}
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
    told, fds = ask("gpuowner.backends.oneshot", [spec, str(device), *map(str, sizes)], len(sizes), _DEADLINE_S)
    return Made(told["device"], told["granularity"], fds, tuple(told["sizes"]))


def ask(
    module: str, arguments: list[str], count: int, deadline_s: float, keep: tuple[int, ...] = ()
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Run ``python -m MODULE CHANNEL ARGUMENTS...``; its one packet and the ``count`` descriptors beside it, after it
    has ended. ``keep``: descriptors that it inherits. Raises HostUnfit or Refused with the child's own words."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = start(module, theirs.fileno(), arguments, keep)
        try:
            return _receive(ours, child, count, deadline_s)
        finally:
            child.kill()  # has ended by now, or is past its deadline
            child.wait()
            assert child.stderr is not None
            child.stderr.close()


def start(module: str, channel: int, arguments: list[str], keep: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """``python -m MODULE CHANNEL ARGUMENTS...``, which inherits ``channel`` and ``keep``."""
    return subprocess.Popen(
        [sys.executable, "-m", module, str(channel), *arguments],
        pass_fds=(channel, *keep),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # device 0 is what nvidia-smi calls 0
            "PYTHONPATH": os.pathsep.join(filter(None, (_TREE, os.environ.get("PYTHONPATH")))),
        },
    )


def _receive(
    ours: socket.socket, child: subprocess.Popen[bytes], count: int, deadline_s: float
) -> tuple[dict[str, Any], tuple[int, ...]]:
    ours.settimeout(deadline_s)
    try:
        data, fds, _ = recv_fds(ours, 1 << 18, max(count, 1))
    except TimeoutError as why:
        raise HostUnfit(f"the child that allocates GPU memory did not answer in {deadline_s:g} s") from why
    if not data:
        raise said(child)
    # Its exit comes before anything is used: what we hold must not depend on a process that might still be there.
    try:
        if len(fds) != count:
            raise Refused(f"the child sent {len(fds)} descriptors for {count}", kept="nothing was allocated")
        child.wait(_DEADLINE_S)
    except (Refused, subprocess.TimeoutExpired) as why:
        for fd in fds:
            os.close(fd)
        if isinstance(why, Refused):
            raise
        raise HostUnfit("the child that allocates GPU memory does not end: the driver hangs") from why
    told: dict[str, Any] = json.loads(data)
    return told, fds


def said(child: subprocess.Popen[bytes]) -> BelayerError:
    """Why a child has ended without its answer, in its own words."""
    assert child.stderr is not None
    words = child.stderr.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    code = child.wait(_DEADLINE_S)
    kind = HostUnfit if code == 2 else Refused
    assert isinstance(child.args, list)
    what = _CHILDREN.get(str(child.args[2]), "no GPU memory (allocating child")
    return kind(f"{what}, exit {code}): {words[-1]}")


def _run(channel: int, spec: str, device: int, wanted: tuple[int, ...]) -> None:
    driver = driver_for(spec)
    driver.init()
    grain = driver.granularity(device)
    sizes = tuple(-(-nbytes // grain) * grain for nbytes in wanted)
    handles = [driver.create(device, nbytes) for nbytes in sizes]
    fds = [driver.export_fd(handle) for handle in handles]
    if driver.has_context(device):
        raise Refused("a context was made where none is needed", remedy="the driver behaves otherwise than cuda.h says")
    answer(channel, {"device": driver.uuid(device), "granularity": grain, "sizes": sizes}, fds)


def answer(channel: int, told: dict[str, Any], fds: list[int]) -> None:
    """The child's one packet."""
    with socket.socket(fileno=channel) as out:
        socket.send_fds(out, [json.dumps(told).encode()], fds)


def guarded(work: Callable[[], None]) -> NoReturn:
    """The child's main: 0, or the sentence on stderr and 2 (this host cannot) or 1."""
    try:
        work()
    except HostUnfit as why:
        print(why, file=sys.stderr)
        sys.exit(2)
    except BelayerError as why:
        print(why, file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def main() -> NoReturn:
    channel, spec, device, *sizes = sys.argv[1:]
    guarded(lambda: _run(int(channel), spec, int(device), tuple(map(int, sizes))))


if __name__ == "__main__":
    main()
