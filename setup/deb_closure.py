"""Print the library packages that a package needs, from Debian's package records on stdin: `deb_closure.py criu`.

Follows Depends and Pre-Depends, first alternative, through packages named lib* or zlib* only: a program unpacked
into a prefix needs its libraries there, and nothing else of a distribution.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

_RELATION = re.compile(r"^\s*([a-z0-9][a-z0-9+.-]+)")


def read_records(lines: Iterable[str]) -> dict[str, list[str]]:
    """Package name to the first alternative of each of its dependencies; the first record of a name wins."""
    records: dict[str, list[str]] = {}
    name, needs = "", list[str]()
    for line in [*lines, "\n"]:
        if line.startswith("Package: "):
            name = line[9:].strip()
        elif line.startswith(("Depends: ", "Pre-Depends: ")):
            for relation in line.partition(": ")[2].split(","):
                match = _RELATION.match(relation)
                if match:
                    needs.append(match.group(1))
        elif not line.strip():
            if name:
                records.setdefault(name, needs)
            name, needs = "", []
    return records


def closure(records: dict[str, list[str]], start: str) -> list[str]:
    if start not in records:
        raise SystemExit(f"no package {start} in these records")
    found, queue = [start], [start]
    while queue:
        for need in records.get(queue.pop(0), []):
            if need.startswith(("lib", "zlib")) and need not in found:
                found.append(need)
                queue.append(need)
    return found


if __name__ == "__main__":
    print("\n".join(closure(read_records(sys.stdin), sys.argv[1])))
