"""Belayer's shared ground floor and client library.

Nothing here imports a daemon. Import arrows point down only (tests/unit/test_imports.py):
``belayer <- gpuowner <- belayerd.worker``, and belayerd, envkeeper and belayerctl each import belayer only.
"""

from __future__ import annotations

__version__ = "0.1.0"
