"""Print the Debian mirror of this machine, read from its own apt sources: `URI KEYRING SUITE`.

The scripts of setup/ name no mirror: they ask this one, so that a machine behind a private mirror keeps using it.
Both formats are read: one-line (`deb [signed-by=..] URI SUITE main`) and deb822 (`Types: / URIs: / Suites:`).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True, slots=True)
class Source:
    uri: str
    suites: tuple[str, ...]
    keyring: str


def parse_one_line(text: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)", line)
        if match:
            options, uri, suite = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            found.append(Source(uri.rstrip("/"), (suite,), signed.group(1) if signed else KEYRING))
    return found


def parse_deb822(text: str) -> list[Source]:
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:
                fields[last] += " " + line.strip()
            elif ":" in line:
                last, _, value = line.partition(":")
                last = last.strip().lower()
                fields[last] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        keyring = fields.get("signed-by", "") or KEYRING
        for uri in fields.get("uris", "").split():
            found.append(Source(uri.rstrip("/"), tuple(fields.get("suites", "").split()), keyring))
    return found


def main_mirror(sources: list[Source], suite: str) -> Source | None:
    """The entry that serves the release itself; an entry that has only its security suite is not a full mirror."""
    return next((s for s in sources if suite in s.suites), None)


def read_machine(apt: Path) -> list[Source]:
    found: list[Source] = []
    parts = apt / "sources.list.d"
    for path in [apt / "sources.list", *(sorted(parts.glob("*")) if parts.is_dir() else [])]:
        if path.suffix == ".list" and path.is_file():
            found += parse_one_line(path.read_text())
        elif path.suffix == ".sources" and path.is_file():
            found += parse_deb822(path.read_text())
    return found


def codename(os_release: str) -> str:
    match = re.search(r'^VERSION_CODENAME="?([a-z]+)', os_release, re.MULTILINE)
    return match.group(1) if match else ""


def main() -> int:
    suite = codename(Path("/etc/os-release").read_text())
    source = main_mirror(read_machine(Path("/etc/apt")), suite) if suite else None
    if source is None:
        print(f"no apt source of this machine serves the Debian release {suite!r}", file=sys.stderr)
        return 1
    print(source.uri, source.keyring, suite)
    return 0


if __name__ == "__main__":
    sys.exit(main())
