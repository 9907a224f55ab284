"""What every verb shares: the root, ``--json``, and exit codes (0 done, 1 refused or unhealthy, 2 usage or
configuration, 3 daemon unreachable). stdout is data, stderr is prose."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec
from rich.console import Console

from belayer.daemon import EXIT_CONFIG, EXIT_REFUSED, EXIT_UNREACHABLE
from belayer.errors import BelayerError, ConfigInvalid, DaemonUnreachable, HostUnfit
from belayer.paths import Paths

OK = 0


def console() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def emit_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def exit_code(error: BelayerError) -> int:
    if isinstance(error, DaemonUnreachable):
        return EXIT_UNREACHABLE
    return EXIT_CONFIG if isinstance(error, ConfigInvalid | HostUnfit) else EXIT_REFUSED


class Seconds(click.FloatRange):
    """A finite number of seconds; click's own range lets "nan" through."""

    def __init__(self) -> None:
        super().__init__(min=0.0, max=86400.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


def verb(function: Callable[..., int]) -> Callable[..., None]:
    """Adds ``--json`` and ``--timeout``, hands over ``paths``; the function returns its exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
    @click.option("--timeout", type=Seconds(), default=10.0, show_default=True, help="Seconds to wait for the daemon.")
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, paths=Paths(), **kwargs)
        except BelayerError as error:
            if kwargs.get("as_json"):
                emit_json({"error": str(error.code), "message": error.message, "remedy": error.remedy})
            click.echo(f"belayerctl: {error}", err=True)
            code = exit_code(error)
        sys.exit(code)

    return wrapped
