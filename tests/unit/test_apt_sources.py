"""What setup/ reads of a machine's package manager: its mirror, in both formats, and what a package needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from setup import apt_sources, deb_closure

ONE_LINE = """
# deb http://old.test/debian buster main
deb-src http://mirror.test/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] http://mirror.test/debian/ bookworm main contrib
deb http://security.test/debian-security bookworm-security main
"""
DEB822 = """
Types: deb
URIs: http://security.test/debian-security
Suites: bookworm-security
Components: main

# a comment
Types: deb deb-src
# another
URIs: http://mirror.test/debian
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Enabled: no
Types: deb
URIs: http://off.test/debian
Suites: bookworm
"""


@pytest.mark.parametrize(
    ("name", "text"), [("sources.list", ONE_LINE), ("sources.list.d/debian.sources", DEB822)], ids=["list", "deb822"]
)
def test_mirror_is_the_entry_of_the_release_itself(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    found = apt_sources.main_mirror(apt_sources.read_machine(tmp_path), "bookworm")
    assert found is not None
    assert (found.uri, found.keyring) == ("http://mirror.test/debian", "/usr/share/keyrings/k.gpg")


def test_switched_off_and_source_only_entries_are_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb-src http://mirror.test/debian trixie main\n")
    assert apt_sources.main_mirror(apt_sources.read_machine(tmp_path), "trixie") is None
    off = apt_sources.parse_deb822("Enabled: no\nTypes: deb\nURIs: http://off.test/debian\nSuites: trixie\n")
    assert off == []


def test_keyring_defaults_to_the_archive_keyring() -> None:
    found = apt_sources.parse_one_line("deb http://mirror.test/debian trixie main")
    assert found[0].keyring == apt_sources.KEYRING


def test_codename() -> None:
    assert apt_sources.codename('NAME="Debian"\nVERSION_CODENAME=trixie\n') == "trixie"
    assert apt_sources.codename("NAME=Alpine\n") == ""


RECORDS = """\
Package: criu
Depends: libc6 (>= 2.38), libnet9 (>= 1.3) | libnet1, python3:any, zlib1g
Pre-Depends: init-system-helpers
Description: x

Package: libc6
Depends: libgcc-s1

Package: libgcc-s1
Depends: gcc-base, libc6

Package: libnet9
Depends: libc6

Package: python3
Depends: libexpat1
"""


def test_closure_follows_libraries_and_nothing_else() -> None:
    records = deb_closure.read_records(RECORDS.splitlines(keepends=True))
    assert deb_closure.closure(records, "criu") == ["criu", "libc6", "libnet9", "zlib1g", "libgcc-s1"]


def test_closure_of_a_package_that_is_not_there_says_so() -> None:
    with pytest.raises(SystemExit, match="no package criu"):
        deb_closure.closure({}, "criu")
