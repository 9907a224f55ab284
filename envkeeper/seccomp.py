"""The system calls of a sandbox: our own profile, the same whatever Docker's default is.

An allow-list: what is not in ``syscalls.txt`` or ruled here fails. Left out is what no dump carries (io_uring, secret
memory), what leads out of the sandbox or makes namespaces in it that no restore brings back, and what is the host's to
do (modules, clocks, swap, quotas, kexec). The digest goes into every manifest: it is part of what a sandbox was.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

_EPERM, _ENOSYS, _EPROTONOSUPPORT = 1, 38, 93

# Named, so that a test can ask for each; the numbers are what a program sees.
REFUSED: dict[str, int] = {
    "io_uring_setup": _ENOSYS,  # its rings are in no dump; "not here" makes libraries fall back
    "io_uring_enter": _ENOSYS,
    "io_uring_register": _ENOSYS,
    "clone3": _ENOSYS,  # its flags lie in memory, where no filter sees them: libc falls back to clone
    "landlock_create_ruleset": _ENOSYS,  # a restored process would be free of its rules, without a word
    "landlock_add_rule": _ENOSYS,
    "landlock_restrict_self": _ENOSYS,
    "memfd_secret": _ENOSYS,  # nobody may read it, so no dump may either
    "unshare": _EPERM,
    "setns": _EPERM,
    "mount": _EPERM,
    "umount2": _EPERM,
    "pivot_root": _EPERM,
    "open_by_handle_at": _EPERM,
    "name_to_handle_at": _EPERM,
    "bpf": _EPERM,
    "perf_event_open": _EPERM,
    "userfaultfd": _EPERM,
    "keyctl": _EPERM,
    "add_key": _EPERM,
    "request_key": _EPERM,
    "kcmp": _EPERM,
    "pidfd_getfd": _EPERM,
    "fanotify_init": _EPERM,
    "quotactl": _EPERM,
    "acct": _EPERM,
    "syslog": _EPERM,
    "swapon": _EPERM,
    "reboot": _EPERM,
    "kexec_load": _EPERM,
    "init_module": _EPERM,
    "finit_module": _EPERM,
    "delete_module": _EPERM,
    "clock_settime": _EPERM,
    "settimeofday": _EPERM,
    "sethostname": _EPERM,
    "iopl": _EPERM,
    "ioperm": _EPERM,
}

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET (sched.h)
_AF_ALG = 38  # from here on: kernel crypto, NFC, vsock, XDP ...: sockets of no use in a sandbox that no dump carries
_MPTCP = 262  # no dump carries it; programs that would like it (Go does by default) fall back to TCP
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # plain, 32-bit uname, and asking

_ARCHITECTURES = [
    {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
    {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
]


def allowed() -> list[str]:
    text = (Path(__file__).with_name("syscalls.txt")).read_text()
    return sorted({name for line in text.splitlines() if not line.startswith("#") for name in line.split()})


@cache
def profile() -> str:
    """JSON as Docker's API takes it behind ``seccomp=``."""
    rules: list[dict[str, Any]] = [_allow(allowed())]
    # A masked comparison: none of the bits may be set. The flags are the first argument on all of our machines.
    rules.append(_allow(["clone"], index=0, value=_NEW_NAMESPACES, valueTwo=0, op="SCMP_CMP_MASKED_EQ"))
    family = {"index": 0, "value": _AF_ALG, "op": "SCMP_CMP_LT"}
    protocol = {"index": 2, "value": _MPTCP, "op": "SCMP_CMP_NE"}
    rules.append({"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [family, protocol]})
    refused = {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": _EPROTONOSUPPORT}
    rules.append(refused | {"args": [protocol | {"op": "SCMP_CMP_EQ"}]})
    rules += [_allow(["personality"], index=0, value=value, op="SCMP_CMP_EQ") for value in _PERSONALITIES]
    for errno in sorted(set(REFUSED.values())):
        names = sorted(name for name, number in REFUSED.items() if number == errno)
        rules.append({"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno})
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "archMap": _ARCHITECTURES, "syscalls": rules})


@cache
def digest() -> str:
    return hashlib.sha256(profile().encode()).hexdigest()


def _allow(names: list[str], **arg: object) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": [arg] if arg else []}
