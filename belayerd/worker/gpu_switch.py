"""The one switch of slots on a GPU.

Everything behind it is built and runs over a fake driver; nothing of it has run on a GPU. It becomes True when the list
"To lift the refusal" in docs/h200.md has passed on one, in its order, and by nothing else.
"""

from __future__ import annotations

from belayer.config import Config
from belayer.errors import HostUnfit

PROVEN_ON_A_GPU = False


def refuse(config: Config, *, proven: bool = PROVEN_ON_A_GPU) -> None:
    """Raise HostUnfit naming the slots that would compute on a GPU."""
    on_gpu = [slot.name for slot in config.slot if slot.device != "cpu"]
    if on_gpu and not proven:
        raise HostUnfit(
            f"slots {on_gpu} name a GPU: no worker of this build has ever run on one",
            kept="nothing was started",
            remedy="docs/h200.md says what is built, and what must pass on a GPU before this is lifted",
        )
