"""A weights owner that stands still between two chunks which it verifies, for as long as the file ``hold`` lies in the
run folder: ``python -m tests.support.slow_owner ARGUMENTS OF THE OWNER``. What it says of itself is its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

from belayer.paths import Paths
from gpuowner import __main__ as owner
from gpuowner import digest


def main() -> int:
    hold, pause, real = Paths().run / "hold", threading.Event(), digest.chunk_digests

    def slowly(buffer: Any, threads: int = 1) -> Iterator[bytes]:
        for index, one in enumerate(real(buffer, threads)):
            while index and hold.exists():
                pause.wait(0.01)
            yield one

    vars(digest)["chunk_digests"] = slowly
    return owner.main()


if __name__ == "__main__":
    sys.exit(main())
