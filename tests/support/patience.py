"""Deadlines of a host under test, where the test is not about them.

Beside the other half of the suite a machine is several times slower than an idle one. A deadline that passes then is a
failure that nobody meant, and it ends in a quarantine or in a torn link.
"""

from __future__ import annotations

# Of belayerd: a gate that is not done in a step is a failed one; an owner that was killed is waited for as long.
_POLICY = {"fence_deadline_s": 60.0, "step_deadline_s": 60.0}
# Of the router. A request waits for longer than a handover may take.
_ROUTER = {"request_deadline_s": 600.0, "link_silence_s": 120.0, "read_deadline_s": 120.0}
# Of other hosts of a fleet; tests cut hosts off, and wait for this to be noticed.
_FLEET = {"slow_s": 9.0, "lost_s": 10.0, "orphan_s": 15.0}

# Lines of a [[slot]] whose main is killed, and never hangs. Belayerd looks at a heartbeat 40 times in this time, and
# what it tells of a worker (its phase, what it runs) is as old.
SLOT = "hang_limit_s = 20.0\n"


def patient(config: str) -> str:
    """``config`` with long deadlines in those of its [policy], [router] and [fleet] that it has. One that it sets by
    itself stays: the test means it."""
    for head, rows in (("[policy]\n", _POLICY), ("[router]\n", _ROUTER), ("[fleet]\n", _FLEET)):
        before, found, after = config.partition(head)
        own = after.partition("\n[")[0]
        more = "".join(f"{name} = {value}\n" for name, value in rows.items() if f"{name} =" not in own)
        config = f"{before}{found}{more}{after}" if found else config
    return config
