"""What a conformance case is: data only. How they are run is in ``runner``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance.runner import Stack

EXACT, REFUSED = "restored exactly", "refused by name"


@dataclass(frozen=True)
class Case:
    """One kind of program, in a folder of its own of a sandbox that it shares with others.

    ``ids``: W<row> of the collected reports, P<n> of the trial's probes, B<n> of our own; ``origin``: where it was
    seen broken. ``start`` leaves ``up`` (pids of its services) when it is ready. ``ask`` must answer ``answer`` on
    the source after the checkpoint, and on what was restored from a checkpoint of what was restored from one.
    ``between`` is run between the two generations.
    """

    ids: tuple[str, ...]
    title: str
    origin: str
    start: str
    ask: str
    answer: str
    between: str = ""
    unless: str = ""  # the kind of refusal that is right where the host cannot do it; such a case is run alone
    twin: bool = True  # the tables of its processes (pids, descriptors, maps, masks) must be equal as well

    expect = EXACT

    @property
    def name(self) -> str:
        return "+".join(self.ids)


@dataclass(frozen=True)
class Refusal:
    """A state that cannot come back: the checkpoint is refused with ``kind``, the sandbox runs on thawed, and after
    ``end`` it can be checkpointed again. ``outside``: what the host does to the sandbox (given as the stack)."""

    ids: tuple[str, ...]
    title: str
    origin: str
    kind: str
    start: str = ""
    end: str = ""
    outside: Callable[[Stack, str], Callable[[], None]] | None = None

    expect = REFUSED

    @property
    def name(self) -> str:
        return "+".join(self.ids)


@dataclass(frozen=True)
class Deed:
    """A case that is not a program in a sandbox but something done to envkeeper. ``run`` asserts, and returns the words
    for the table."""

    ids: tuple[str, ...]
    title: str
    origin: str
    expect: str
    run: Callable[[Stack], str]

    @property
    def name(self) -> str:
        return "+".join(self.ids)


def case(
    ids: str, title: str, origin: str, program: tuple[str, str], answer: str, *, twin: bool = True, unless: str = ""
) -> Case:
    """``ids`` apart by blanks; ``program`` as ``service`` makes it."""
    return Case(tuple(ids.split()), title, origin, *program, answer, twin=twin, unless=unless)


Any_ = Case | Refusal | Deed

CRIU = "https://github.com/checkpoint-restore/criu/issues/"
TRIAL = "our trial"
HEAD = "from lib import *\n"


def service(setup: str, after: str = "", *, ask: str = "", up: str = "up()") -> tuple[str, str]:
    """(start, ask) of a Python program: ``setup``, then it says that it is up, waits for ``go`` and does ``after``,
    which must ``say`` something."""
    body = f"{HEAD}{setup}\n{up}\ntold()\n{after or 'say()'}\nsignal.pause()\n"
    start = f"cat > main.py <<'PROGRAM'\n{body}PROGRAM\npython3 main.py </dev/null >err 2>&1 &\nwait_up"
    return start, f"touch go; wait_out; cat out{'; ' + ask if ask else ''}"
