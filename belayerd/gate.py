"""Handover step 2, "health": what is asked of a slot's device before anything resident on it is reused (promise R5).

A GPU: NVML's view (``nvml``), a small kernel in the candidate's own warm context, and, after a contained memory error,
every digest of the weights that it maps. A CPU has nothing of this kind, and the text says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import msgspec

from belayer.errors import BelayerError, GpuUnhealthy, WorkerFailed, WorkerGone
from belayer.messages.common import Done
from belayer.messages.worker import ProbeDevice
from belayerd.health import Answer, State
from belayerd.nvml import Device, load_nvml

CPU = "cpu"
NOTHING_CHECKED = "cpu: nothing of the device is checked; the oracle on the real arena is its proof"

R = TypeVar("R", bound=msgspec.Struct)


class Link(Protocol):
    """To the candidate (belayerd.links.WorkerLink)."""

    async def call(self, message: msgspec.Struct, reply: type[R], within: float) -> R: ...


class HealthGate:
    """``names``: as [[slot]] gives them; ``open_device`` makes the baseline of one. Raises HostUnfit: no such
    device."""

    def __init__(self, names: Iterable[str], open_device: Callable[[str], Device]) -> None:
        self._open = open_device
        self._devices = {name: open_device(name) for name in sorted(set(names)) if name != CPU}

    async def renew(self, device: str) -> None:
        """An operator says that the device is well again (a reset, another card): everything is opened and counted
        anew. Raises HostUnfit, the old state kept."""
        if device != CPU:
            self._devices[device] = await asyncio.to_thread(self._open, device)

    async def check(self, device: str, link: Link, within: float) -> str:
        """What was checked, in words. Raises GpuUnhealthy with every reason; WorkerGone when the candidate died."""
        if device == CPU:
            return NOTHING_CHECKED
        probe = await _probe(link, within, full=False)
        verdict = await asyncio.to_thread(self._devices[device].check, probe)
        reasons = list(verdict.reasons)
        said = verdict.describe()
        if not reasons and verdict.full_checksum:
            full = await _probe(link, within, full=True)
            if full.state is not State.ANSWERED:
                reasons.append(f"digests after a contained memory error: {full.said}")
            said += f"; {full.said}"
        if reasons:
            raise GpuUnhealthy(
                f"device {device} ({self._devices[device].uuid}): {'; '.join(reasons)}",
                kept="the arena stays free, nothing resident is reused",
                remedy="nvidia-smi -q shows the device; belayerctl restore SLOT once it is well",
            )
        return said


async def _probe(link: Link, within: float, *, full: bool) -> Answer:
    try:
        done = await link.call(ProbeDevice(full=full), Done, within)
    except WorkerGone:
        raise
    except WorkerFailed as why:  # no answer in the bound: the kernel, or the context, hangs
        return Answer(State.TIMEOUT, said=why.message)
    except BelayerError as why:
        return Answer(State.FAILED, said=why.message)
    return Answer(State.ANSWERED, said=done.detail)


def open_gate(
    devices: Iterable[str], open_device: Callable[[str], Device] = lambda name: Device(load_nvml(), name)
) -> HealthGate:
    """The gate of a host's slots. Raises HostUnfit: no NVML, no such device."""
    return HealthGate(devices, open_device)
