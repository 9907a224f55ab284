"""``python -m belayerd.worker --slot NAME [--worker-id ID] [--config PATH]``: one worker without a zygote.

The cold way: imports vLLM itself, which is what a fork from the zygote saves. For benchmarks and for debugging.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from belayer.config import load
from belayer.daemon import say
from belayer.errors import BelayerError, ConfigInvalid
from belayer.ids import new_worker_id
from belayer.paths import Paths
from belayerd.worker.zygote import ENVIRONMENT, import_engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="belayerd.worker", description="One worker, started cold.")
    parser.add_argument("--slot", required=True)
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        paths = Paths().make()
        config = load(args.config or paths.config)
        if args.slot not in {slot.name for slot in config.slot}:
            raise ConfigInvalid(f"no [[slot]] is named {args.slot!r}")
        import_engine(config)
        import_module("belayerd.worker.main").run(args.worker_id or new_worker_id(args.slot), args.slot, config, paths)
    except BelayerError as why:
        return say(why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
