"""Logging for journald: one line per transition on stderr, key=value."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import structlog


class _Stderr:
    """Standard error that ends nobody: workers log to files, and a full disk must cost lines and no main."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def setup(daemon: str) -> Any:
    """Configure structlog for this process and return its logger; level from ``BELAYER_LOG`` (default info)."""
    level = getattr(logging, os.environ.get("BELAYER_LOG", "info").upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=_Stderr()),
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger().bind(daemon=daemon)
