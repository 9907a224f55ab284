"""Record locks of a process on files that it maps come back, and exclude others (promise E4): CRIU alone loses them
without a word (envkeeper/runtime/relock.c)."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.errors import RestoreFailed
from belayer.sandbox import Sandbox
from envkeeper import relocks
from envkeeper.checkpoint import CRIU_FOLDER
from envkeeper.store import Store
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the plugin of CRIU's restore is for x86-64"),
]

# A reader in the middle of its transaction, and a writer in the middle of its own, for ever: each answers a line.
BOTH = r"""
import sqlite3, sys, os
c = sqlite3.connect("/db", isolation_level=None)
if sys.argv[1] == "reader":
    c.execute("begin"); n = c.execute("select count(*) from t").fetchone()[0]
else:
    c.execute("begin immediate"); c.execute("insert into t values (8)")
open(f"/{sys.argv[1]}.up", "w").close()
for line in open(f"/{sys.argv[1]}"):
    if sys.argv[1] == "writer": c.execute("commit")
    print(c.execute("select count(*) from t").fetchone()[0], c.execute("pragma integrity_check").fetchone()[0],
          file=open("/said", "a"), flush=True)
"""
PREPARE = rf"""
cat > /both.py <<'END'
{BOTH}
END
python3 -c 'import sqlite3
c = sqlite3.connect("/db"); c.execute("pragma journal_mode=wal"); c.execute("create table t(x)")'
mkfifo /reader /writer; exec 7<>/reader 8<>/writer
python3 /both.py reader & python3 /both.py writer &
until [ -e /reader.up ] && [ -e /writer.up ]; do sleep 0.02; done; X=41
"""
OTHER = (
    'python3 -c \'import sqlite3; c = sqlite3.connect("/db", timeout=0)\n'
    'try: c.execute("begin immediate"); print("free")\nexcept sqlite3.OperationalError as e: print(e)\''
)
# Ranges of both kinds, shared and exclusive, on two files of one process, one mapped through a descriptor closed since.
RANGES = r"""
import fcntl, mmap, os, time
for name in ("/one", "/two"): open(name, "wb").write(bytes(8192))
a, b = open("/one", "r+b"), open("/two", "r+b")
m, other = mmap.mmap(a.fileno(), 4096), os.open("/two", os.O_RDWR)
n = mmap.mmap(other, 4096); os.close(other)
fcntl.lockf(a, fcntl.LOCK_EX, 10, 100); fcntl.lockf(a, fcntl.LOCK_SH, 1, 500); fcntl.lockf(b, fcntl.LOCK_EX, 0, 4096)
open("/ranges.up", "w").close()
while True: time.sleep(100)
"""


@pytest.fixture(scope="module")
def host() -> Iterator[EnvHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        found = EnvHost.start(Path(folder))
        yield found
        found.stop()


def lose(host: EnvHost, box: Sandbox) -> None:
    os.kill(host.info(box.sandbox_id).pid, signal.SIGKILL)
    eventually(lambda: host.info(box.sandbox_id).state == "lost", what="the death is seen")


def locks(host: EnvHost, box: Sandbox) -> list[str]:
    """Kind, access and range of every record lock in the sandbox, as the kernel lists them."""
    inside = set()
    mine = os.readlink(f"/proc/{host.info(box.sandbox_id).pid}/ns/pid")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                inside |= {folder.name} if os.readlink(folder / "ns/pid") == mine else set()
            except OSError:
                continue
    rows = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return sorted(" ".join([row[1], row[3], *row[6:]]) for row in rows if row[1] == "POSIX" and row[4] in inside)


def test_sqlite_in_wal_mode_reader_and_writer(host: EnvHost, box: Sandbox) -> None:
    box.exec(PREPARE)
    before = locks(host, box)
    assert len(before) >= 4, "both hold locks on the mapped index"
    assert box.exec(OTHER).stdout == "database is locked\n"
    box.checkpoint()
    for _ in range(2):  # a generation of a restored one as well
        lose(host, box)
        box.restore()
        assert locks(host, box) == before
        assert box.exec(OTHER).stdout == "database is locked\n", "another process is really kept out"
        box.checkpoint()
    box.exec("echo go > /writer; until [ -s /said ]; do sleep 0.02; done; echo go > /reader")
    box.exec('until [ "$(wc -l < /said)" = 2 ]; do sleep 0.02; done', timeout_s=60)
    assert box.exec("cat /said").stdout == "1 ok\n0 ok\n", "the reader still sees its own snapshot"
    assert box.exec(OTHER).stdout == "free\n"
    assert box.exec("echo $X").stdout == "41\n"


def test_ranges_of_both_kinds_come_back(host: EnvHost, box: Sandbox) -> None:
    box.exec(f"cat > /r.py <<'END'\n{RANGES}\nEND\npython3 /r.py & until [ -e /ranges.up ]; do sleep 0.02; done")
    before = locks(host, box)
    assert [row.split()[1:] for row in before] == [
        ["READ", "500", "500"],
        ["WRITE", "100", "109"],
        ["WRITE", "4096", "EOF"],
    ]
    made = box.checkpoint()
    images = Store(host.paths.checkpoints, box.sandbox_id).folder(made.checkpoint_id) / CRIU_FOLDER
    assert relocks.recorded(images) == 3
    lose(host, box)
    box.restore()
    assert locks(host, box) == before


@pytest.mark.parametrize("said", ["", "1\n", "failed: pid 3, descriptor 4: errno 11\n"])
def test_a_restore_that_took_fewer_is_refused(tmp_path: Path, said: str) -> None:
    lock = bytes([8, 1, 16, 1, 24, 7, 32, 3, 40, 0, 48, 0])
    (tmp_path / relocks.IMAGE).write_bytes(bytes(8) + 2 * (len(lock).to_bytes(4, "little") + lock))
    if said:
        (tmp_path / relocks.TAKEN).write_text(said)
    with pytest.raises(RestoreFailed, match="of 2 record locks"):
        relocks.prove(tmp_path)
    (tmp_path / relocks.TAKEN).write_text("2\n")
    relocks.prove(tmp_path)
