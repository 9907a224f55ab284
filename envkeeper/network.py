"""Egress of a sandbox, allowed by name or not at all (promise E7).

A sandbox without an allow-list has loopback and nothing else. One with a list lives in the network namespace of a
*holder*: a container of ours that does nothing, made before it and kept over its restores, because Docker 28 cannot
restore a container that has a namespace of its own. The rules are the host's, written into the holder's namespace and
read back; the sandbox has no capability to change them. Everything else is dropped, in both directions and for IPv6.

Names: there is no resolver but one that is allowed ("10.0.0.2:53/udp", which then is in /etc/resolv.conf), and a name
resolves to whatever it says: rules are about addresses. Connections to outside peers do not survive a restore, and the
preflight refuses a dump with one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from belayer.errors import HostNotReady, HostUnfit, Refused
from envkeeper.passing import is_short

_TOOL_S = 60.0  # iptables waits for its lock, which every container of a busy host takes
_TRIES, _PAUSE_S = 3, 0.3
_TEXT = re.compile(
    r"(?P<net>[0-9.]+(?:/[0-9]{1,2})?):(?P<low>[0-9]{1,5})(?:-(?P<high>[0-9]{1,5}))?(?:/(?P<kind>tcp|udp))?"
)


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """IPv4 only. Ports from ``low`` to ``high``, both included."""

    net: ipaddress.IPv4Network
    low: int
    high: int
    kind: str

    def __str__(self) -> str:
        ports = str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
        return f"{self.net}:{ports}/{self.kind}"

    def within(self, other: Rule) -> bool:
        return (
            self.kind == other.kind
            and self.net.subnet_of(other.net)
            and other.low <= self.low
            and self.high <= other.high
        )


def parse(text: str) -> Rule:
    """``ADDRESS[/BITS]:PORT[-PORT][/tcp|udp]``, tcp when not said. Raises Refused."""
    found = _TEXT.fullmatch(text)
    try:
        if not found:
            raise ValueError("not of the form ADDRESS[/BITS]:PORT[-PORT][/tcp|udp]")
        net = ipaddress.IPv4Network(found["net"])
    except ValueError as why:
        raise Refused(f"{text!r} allows nothing: {why}", remedy='for example "10.0.0.0/8:443/tcp"') from why
    low = int(found["low"])
    high = int(found["high"] or low)
    if not 1 <= low <= high <= 65535:
        raise Refused(f"{text!r} allows nothing: ports are 1-65535, the lower one first")
    return Rule(net, low, high, found["kind"] or "tcp")


def permit(asked: Sequence[str], operator: Sequence[str]) -> tuple[str, ...]:
    """``asked`` in normal form and order. Raises Refused for what ``operator`` (the configuration) does not cover."""
    limits = [parse(text) for text in operator]
    rules = sorted({parse(text) for text in asked})
    for rule in rules:
        if not any(rule.within(limit) for limit in limits):
            raise Refused(
                f"egress to {rule} is not allowed on this host", remedy="name it in [envkeeper] egress, or ask for less"
            )
    return tuple(map(str, rules))


def table(allow: Sequence[str]) -> str:
    """The filter table as iptables-save prints it, so that what was written can be compared with what is there."""
    rows = [
        "-A INPUT -i lo -j ACCEPT",
        "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        # Docker's own resolver on networks that it names: it asks from the host, past every rule here.
        "-A OUTPUT -d 127.0.0.11/32 -j DROP",
        "-A OUTPUT -o lo -j ACCEPT",
        "-A OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    ]
    for rule in map(parse, allow):
        ports = str(rule.low) if rule.low == rule.high else f"{rule.low}:{rule.high}"
        where = "" if rule.net.prefixlen == 0 else f"-d {rule.net} "
        rows.append(f"-A OUTPUT {where}-p {rule.kind} -m {rule.kind} --dport {ports} -j ACCEPT")
    # Told at once instead of left to wait; the policy below it drops what this could miss.
    return _table([*rows, "-A OUTPUT -j REJECT --reject-with icmp-port-unreachable"])


def resolvers(allow: Sequence[str]) -> list[str]:
    """Addresses for /etc/resolv.conf: single hosts that may be asked by udp at port 53. Where there is none, loopback,
    which refuses at once."""
    rules = [rule for rule in map(parse, allow) if rule.kind == "udp" and rule.low <= 53 <= rule.high]
    return [str(rule.net.network_address) for rule in rules if rule.net.prefixlen == 32] or ["127.0.0.1"]


def table6() -> str:
    return _table(["-A INPUT -i lo -j ACCEPT", "-A OUTPUT -o lo -j ACCEPT"])


def _table(rows: list[str]) -> str:
    chains = [f":{chain} DROP [0:0]" for chain in ("INPUT", "FORWARD", "OUTPUT")]
    return "\n".join(["*filter", *chains, *rows, "COMMIT", ""])


def close(pid: int, allow: Sequence[str]) -> None:
    """Write the rules into the network namespace of ``pid`` and read them back. Raises HostUnfit."""
    for tool, text in (("iptables", table(allow)), ("ip6tables", table6())):
        if not _same(_run(pid, f"{tool}-save", "-t", "filter"), text):
            _run(pid, f"{tool}-restore", "-w", given=text)
    verify(pid, allow)


def verify(pid: int, allow: Sequence[str]) -> None:
    """Raises HostUnfit when the rules that are there are not those of ``allow``: a policy that cannot be verified is
    none."""
    for tool, text in (("iptables", table(allow)), ("ip6tables", table6())):
        if not _same(_run(pid, f"{tool}-save", "-t", "filter"), text):
            raise HostUnfit(
                f"the {tool} rules of the holder (pid {pid}) are not what was written",
                remedy="see that nothing else writes rules into containers' namespaces",
            )


def _same(seen: str, wanted: str) -> bool:
    return _bare(seen) == _bare(wanted)


def _bare(text: str) -> list[str]:
    """Without comments and counters."""
    lines = (re.sub(r"\[\d+:\d+\]", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _run(pid: int, *command: str, given: str = "") -> str:
    """Reading changes nothing, and a table is written whole or not at all: either may be asked again."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(HostNotReady):
            return _run_once(pid, *command, given=given)
        time.sleep(_PAUSE_S)
    return _run_once(pid, *command, given=given)


def _run_once(pid: int, *command: str, given: str) -> str:
    full = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command]
    try:
        done = subprocess.run(full, input=given, capture_output=True, text=True, check=False, timeout=_TOOL_S)
    except FileNotFoundError as why:
        raise HostUnfit(f"no {why.filename} on this host", remedy="install iptables and util-linux") from why
    except subprocess.TimeoutExpired as why:
        raise HostNotReady(f"{command[0]} did not end within {why.timeout:g} s", remedy="try again later") from why
    if done.returncode:
        said = done.stderr.strip()[:300]
        kind = HostNotReady if is_short(said) or "xtables lock" in said else HostUnfit
        raise kind(f"{command[0]} failed in the holder's network: {said}")
    return done.stdout
