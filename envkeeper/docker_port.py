"""The one border to Docker: every request goes out here, and every answer is read inside ``reading``.

Docker may be away, die in the middle of an answer, answer 500, or answer something that is no answer. None of it may
end envkeeper (promise O1), so all of it becomes one of three typed errors here, also what goes wrong while an answer is
taken apart: a missing key is Docker's fault, not a broken invariant of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
import docker.errors
import requests
import urllib3

from belayer.errors import BelayerError, ErrorCode, HostNotReady

TIMEOUT_S = 120.0  # a create or start on a busy host; also bounds a dockerd that hangs
GLANCE_S = 10.0  # for what is asked for people only

_UNANSWERED = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, docker.errors.DockerException)


class EngineFault(BelayerError):
    """Docker refused, or answered what is no answer. ``status``: of HTTP, 0 when it was none."""

    code = ErrorCode.HOST_UNFIT

    def __init__(self, message: str, *, status: int = 0, said: str = "") -> None:
        super().__init__(message, remedy="see the log of dockerd")
        self.status, self.said = status, said


class EngineAway(HostNotReady):
    """Docker does not answer: nobody knows whether it has done what it was asked for. ``late``: its time was over."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message, remedy="start dockerd, or set envkeeper.docker")
        self.late = late


class DockerPort:
    """``url``: Docker's socket. For several threads: each has its own HTTP session."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._local = threading.local()
        self._version = ""  # of the API; asked for once, so that a new thread's first request is the caller's own

    def client(self, timeout_s: float = TIMEOUT_S) -> Any:
        """docker.APIClient of this thread. Only inside ``reading``: the first one asks Docker for its version."""
        client = getattr(self._local, "client", None)
        if client is None:
            client = docker.APIClient(base_url=self.url, version=self._version or "auto")
            self._local.client, self._version = client, client.api_version
        client.timeout = timeout_s
        return client

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Around a request and all that takes its answer apart, and nothing else. ``what``: "to create a container".
        Raises EngineFault, EngineAway; typed errors of ours pass."""
        try:
            yield
        except docker.errors.APIError as why:
            status = why.response.status_code if why.response is not None else 0
            said = str(why.explanation or why)
            raise EngineFault(f"Docker refused {what}: {said}", status=status, said=said) from why
        except requests.exceptions.JSONDecodeError as why:
            raise self._no_answer(what, why) from why
        except _UNANSWERED as why:
            late = isinstance(why, requests.exceptions.Timeout)
            raise EngineAway(f"Docker does not answer at {self.url}", late=late) from why
        except (LookupError, TypeError, ValueError, AttributeError) as why:
            raise self._no_answer(what, why) from why

    @staticmethod
    def _no_answer(what: str, why: Exception) -> EngineFault:
        return EngineFault(f"Docker was asked {what} and answered what is no answer ({type(why).__name__}: {why})")
