"""Rules of egress: what can be said, what an operator allows, and the table that is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import Refused
from envkeeper import network, seccomp

nets = st.builds(lambda a, bits: f"{a >> bits << bits >> 24 & 255}.{a >> bits << bits >> 16 & 255}."
                 f"{a >> bits << bits >> 8 & 255}.{a >> bits << bits & 255}/{32 - bits}",
                 st.integers(0, 2**32 - 1), st.integers(0, 32))  # fmt: skip
rules = st.builds(
    lambda net, ports, kind: f"{net}:{min(ports)}-{max(ports)}/{kind}",
    nets,
    st.tuples(st.integers(1, 65535), st.integers(1, 65535)),
    st.sampled_from(["tcp", "udp"]),
)


@given(rules)
def test_a_rule_says_itself(text: str) -> None:
    rule = network.parse(text)
    assert network.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "10.0.0.1:9-8", "10.0.0.1/8:1", "10.0.0.1/33:1",
     "example.org:443", "::1:443", "10.0.0.1:1/icmp", "10.0.0.1:1\n-A OUTPUT -j ACCEPT", "10.0.0.1:1 -j ACCEPT"],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        network.parse(text)


@given(st.lists(rules, max_size=5), st.lists(rules, max_size=5))
def test_only_what_the_operator_covers_is_permitted(asked: list[str], operator: list[str]) -> None:
    limits = [network.parse(text) for text in operator]
    fine = all(any(network.parse(text).within(limit) for limit in limits) for text in asked)
    if fine:
        assert set(map(network.parse, network.permit(asked, operator))) == set(map(network.parse, asked))
    else:
        with pytest.raises(Refused, match="not allowed on this host"):
            network.permit(asked, operator)


def test_nothing_is_permitted_by_default() -> None:
    assert network.permit((), ()) == ()
    with pytest.raises(Refused):
        network.permit(("10.0.0.1:443",), ())


@given(st.lists(rules, max_size=6))
def test_the_table_drops_by_policy_and_accepts_only_what_is_named(allow: list[str]) -> None:
    lines = network.table(allow).splitlines()
    assert [line for line in lines if line.startswith(":")] == [
        f":{chain} DROP [0:0]" for chain in ("INPUT", "FORWARD", "OUTPUT")
    ]
    accepts = [line for line in lines if line.startswith("-A OUTPUT") and line.endswith("ACCEPT")]
    assert len(accepts) == 2 + len(allow)  # loopback, established
    assert lines.index("-A OUTPUT -d 127.0.0.11/32 -j DROP") < lines.index("-A OUTPUT -o lo -j ACCEPT")


def test_resolvers_are_only_those_that_may_be_asked() -> None:
    assert network.resolvers(["10.0.0.2/32:53/udp", "10.0.0.3/32:53/tcp", "10.1.0.0/16:53/udp"]) == ["10.0.0.2"]
    assert network.resolvers(["10.0.0.2/32:443/tcp"]) == ["127.0.0.1"]


def test_no_call_is_both_allowed_and_refused() -> None:
    assert set(seccomp.allowed()) & {*seccomp.REFUSED, "clone", "socket", "personality"} == set()
    assert {"read", "openat2", "execve", "futex", "ptrace", "close_range"} <= set(seccomp.allowed())
