"""A zygote whose workers die while vLLM schedules: the moment in which a block has a hash and no content yet.

    python -m tests.support.dying [--early] ARGUMENTS OF THE ZYGOTE

When the file ``die`` lies in the run folder, the next main to enter a block in its prefix cache is killed there.
``--early`` is the control: its workers publish a block at that moment, as vLLM enters it, and not after the step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from belayer.paths import Paths
from belayerd.worker import zygote


def dying_pool(early: bool) -> Any:
    """The class, once vLLM may be imported."""
    from belayerd.worker.adapter.reuse import LoggedPool

    class DyingPool(LoggedPool):
        def _insert_block_hash(self, *args: Any, **kwargs: Any) -> None:
            super()._insert_block_hash(*args, **kwargs)
            if not self.reuse.log.active:
                return
            if early:
                self.reuse.after_step()
            flag = Paths().run / "die"
            if flag.exists():
                flag.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    return DyingPool


def main() -> int:
    early = "--early" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--early"]
    for name, value in zygote.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from belayerd.worker.adapter.reuse import Reuse

    Reuse.pool_class = dying_pool(early)
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
