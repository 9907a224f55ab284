"""A process of stage T1, started as a file: ``touch.py SPEC VERB FD NBYTES``."""

from __future__ import annotations

import os
import sys

from benchmarks.h200.stages import touch

spec, verb, fd, nbytes = sys.argv[1:]
os._exit(touch(spec, verb, int(fd), int(nbytes)))
