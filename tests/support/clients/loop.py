"""How a client script talks with its test: ``ready`` once, then for each line on stdin one line of JSON on stdout.

The scripts run in an environment of their own (setup/clients.sh), so they import nothing of ours but this file, and
nothing of the client that they hold is changed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(ask: Callable[[], Any]) -> None:
    """Answer until stdin ends. What the client prints goes to stderr: stdout is the test's alone."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        print(json.dumps(ask()), file=out, flush=True)
