"""A trajectory: the log L and its sandbox E, moved together (paper section 2: the consistent prefix (L_k, E_k)).

    with Trajectory(sandbox, messages) as run:
        run.say(thought)                    # what the model generated
        try:
            seen = run.act("make test")     # a committed observation, appended to the log
        except SandboxLost:
            k = run.recover()               # sandbox and log are back at the last ready boundary k; generate again

An action whose fate is unknown is never replayed (promise E5): ``recover`` goes back to a boundary, the model speaks
again from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from belayer.errors import RestoreFailed
from belayer.messages.sandbox import CheckpointInfo, Observation, RestoreInfo
from belayer.trajectory import context_digest

Entry = dict[str, Any]


class SandboxLike(Protocol):
    """What a trajectory needs of belayer.sandbox.Sandbox."""

    boundary: int

    def exec(self, command: str, *, context: Sequence[Any] = (), timeout_s: float = 0.0) -> Observation: ...

    def checkpoint(self, context: Sequence[Any] = ()) -> CheckpointInfo: ...

    def restore_info(self, checkpoint_id: str = "", *, note: str = "") -> RestoreInfo: ...


class Boundary(msgspec.Struct, frozen=True):
    """After the k-th committed action: length and digest of L_k."""

    length: int
    digest: str


class Trajectory:
    """``messages`` is the log in the chat format of the LLM's API; it grows in place and shrinks on ``recover``."""

    def __init__(self, sandbox: SandboxLike, messages: list[Entry]) -> None:
        self.sandbox, self.messages = sandbox, messages
        self.lost = 0
        self._boundaries = {sandbox.boundary: self._now()}

    def _now(self) -> Boundary:
        return Boundary(len(self.messages), context_digest(self.messages))

    def say(self, content: str) -> None:
        """The model's turn."""
        self.messages.append({"role": "assistant", "content": content})

    def act(self, command: str, *, timeout_s: float = 0.0) -> Observation:
        """Run one action; its observation is in the log when this returns. Raises SandboxLost: nothing is in the
        log, call ``recover``."""
        seen = self.sandbox.exec(command, context=self.messages, timeout_s=timeout_s)
        self.messages.append({"role": "user", "content": self.show(seen)})
        self._boundaries[seen.boundary] = self._now()
        return seen

    @staticmethod
    def show(seen: Observation) -> str:
        """How an observation reads in the log; override for another format."""
        return f"exit code {seen.exit_code}\n{seen.stdout}{seen.stderr}"

    def checkpoint(self) -> CheckpointInfo:
        """Make the boundary of now ready. Only between actions; the log may already hold the model's next words,
        which do not belong to L_k."""
        mark = self._boundaries[self.sandbox.boundary]
        return self.sandbox.checkpoint(self.messages[: mark.length])

    def recover(self, checkpoint_id: str = "", *, note: str = "") -> RestoreInfo:
        """Sandbox and log back to one ready boundary. Raises RestoreFailed when the restored sandbox belongs to a log
        that this trajectory does not have: then neither is used.

        ``note``: what went wrong in the attempt that is given up; it comes back in ``notes``, with those of earlier
        ones, for the next prompt, and lies in the sandbox."""
        info = self.sandbox.restore_info(checkpoint_id, note=note)
        mark = self._boundaries.get(info.boundary)
        if mark is None or mark.digest != info.context_digest:
            raise RestoreFailed(
                f"the sandbox came back at boundary {info.boundary} of another context",
                kept="the log as it was",
                remedy="start this trajectory anew",
            )
        del self.messages[mark.length :]
        self._boundaries = {k: b for k, b in self._boundaries.items() if k <= info.boundary}
        self.lost += 1
        return info
