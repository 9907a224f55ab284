"""vLLM's sleep-mode backend "belayer": suspend parks graphs and workspace, and nothing else.

vLLM's own backend offloads or drops weights by level. Here weights and KV lie in the owners' memory, which other
workers map: they stay where they are at every level, so that a suspended standby still has the sealed version.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from belayer.errors import HostUnfit, Refused
from belayerd.worker.adapter.gpu_pools import OWNED
from belayerd.worker.adapter.gpu_seat import gpu_seat

NAME = "belayer"


class BelayerSleepBackend(SleepModeBackend):
    """``level`` and ``tags`` of vLLM's API choose among weights and KV, which are not ours to move: all graph memory
    goes and comes together."""

    def suspend(self, level: int = 1) -> None:
        gpu_seat().device.park()
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        gpu_seat().device.unpark()
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Without saving. Raises Refused for weights and KV, with nothing discarded."""
        owned = sorted(set(tags) & set(OWNED))
        if owned:
            raise Refused(
                f"{', '.join(owned)} cannot be discarded: other workers map it",
                kept="everything",
                remedy="update weights through gpuowner; an arena is given back with its lease",
            )
        gpu_seat().device.pools.discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True  # NCCL's buffers are in no pool of ours

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True  # the same process, modules stay loaded


def register() -> None:
    """Idempotent. Raises HostUnfit when the name is another's."""
    registry = SleepModeBackendFactory._registry
    if NAME not in registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, BelayerSleepBackend.__name__)
    found = SleepModeBackendFactory.get_backend_class(NAME)
    if found is not BelayerSleepBackend:
        raise HostUnfit(f"vLLM's sleep-mode backend {NAME!r} is {found.__module__}.{found.__name__}, not ours")
