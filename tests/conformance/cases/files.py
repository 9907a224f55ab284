"""Open files, locks, and what a program sees of its file system."""

# ruff: noqa: E501  (programs of the sandbox)
from __future__ import annotations

from tests.conformance.model import CRIU, TRIAL, Case, case, service

CASES = [
    case(
        "P1",
        "open file with its offset",
        TRIAL,
        service("f = os.open('f', os.O_RDWR | os.O_CREAT); os.write(f, b'abcdef'); os.lseek(f, 3, 0)",
                "say(os.read(f, 10), os.lseek(f, 0, 1))"),
        "def 6\n",
    ),
    case(
        "P2",
        "append-only file that another process appends to",
        TRIAL,
        service("f = open('f', 'ab', 0); f.write(b'one')",
                "open('f', 'ab').write(b'two'); f.write(b'three'); say(open('f').read())"),
        "onetwothree\n",
    ),
    case(
        "P3",
        "small deleted but open file",
        TRIAL,
        service("f = open('f', 'w+'); f.write('kept'); f.flush(); os.unlink('f')",
                "f.seek(0); say(f.read(), os.fstat(f.fileno()).st_nlink, os.path.exists('f'))"),
        "kept 0 False\n",
    ),
    case(
        "W15 P45",
        "deleted but open file of 5 MB",
        CRIU + "491",
        service("f = open('f', 'w+b'); f.write(b'x' * 5000000); f.flush(); os.unlink('f')",
                "f.seek(0); d = f.read(); say(len(d), set(d), os.path.exists('f'))"),
        "5000000 {120} False\n",
    ),
    case(
        "W17",
        "deleted but open file whose name exists again",
        CRIU + "1896",
        service("f = open('f', 'w+'); f.write('old'); f.flush(); os.unlink('f'); open('f', 'w').write('new')",
                "f.seek(0); say(f.read())", ask="cat f"),
        "old\nnew",
    ),
    case(
        "P4",
        "working directory that was deleted",
        TRIAL,
        service("os.mkdir('d'); os.chdir('d'); os.rmdir('../d')",
                "say(os.readlink('/proc/self/cwd').endswith('(deleted)'), os.listdir('.'), os.path.exists('../d'))"),
        "True [] False\n",
    ),
    case(
        "P5",
        "mapped shared library that was deleted",
        TRIAL,
        service("import glob, shutil; shutil.copy(glob.glob('/lib/*/libz.so.1')[0], 'z.so')\n"
                "z = ctypes.CDLL('./z.so'); os.unlink('z.so'); z.zlibVersion.restype = ctypes.c_char_p",
                "say(z.zlibVersion()[:2], os.path.exists('z.so'))"),
        "1. False\n",
    ),
    case(
        "P6",
        "read-only descriptor of an image file that was copied up afterwards",
        TRIAL,
        service("was = open('/etc/debian_version').read(); f = open('/etc/debian_version'); old = f.read(2); open('/etc/debian_version', 'a').write('more\\n')",
                "say(old + f.read(len(was) - 2) == was)", ask="tail -1 /etc/debian_version"),
        "True\nmore\n",
    ),
    case(
        "W19 P46",
        "open file of the image that was deleted",
        "https://github.com/checkpoint-restore/criu/pull/1672",
        service("was = open('/usr/lib/os-release').read(); f = open('/usr/lib/os-release'); f.read(12); os.unlink('/usr/lib/os-release')",
                "f.seek(0); say(f.read() == was != '', os.path.exists('/usr/lib/os-release'))"),
        "True False\n",
    ),
    case(
        "P48",
        "open file whose name was deleted, alive through another hard link",
        CRIU + "2016",
        service("f = open('a', 'w+'); f.write('one'); f.flush(); os.link('a', 'b'); os.unlink('a')",
                "f.write('two'); f.flush(); s = os.fstat(f.fileno())\n"
                "say(s.st_nlink, s.st_ino == os.stat('b').st_ino, sorted(n for n in os.listdir() if len(n) == 1))",
                ask="cat b; ls -a | grep -c link_remap || true"),
        "1 True ['b']\nonetwo0\n",
    ),
    case(
        "P26",
        "file mapped shared: memory and file agree",
        TRIAL,
        service("f = open('f', 'w+b'); f.truncate(8192); m = mmap.mmap(f.fileno(), 8192); m[5000:5003] = b'hey'",
                "m[5003:5006] = b'you'; say(open('f', 'rb').read()[5000:5006])"),
        "heyyou\n",
    ),
    case(
        "P35",
        "nine hundred open files",
        TRIAL,
        service("fs = [os.open(f'f{i}', os.O_RDWR | os.O_CREAT) for i in range(900)]\n"
                "for i, f in enumerate(fs): os.write(f, b'x' * (i + 1))",
                "say(all(os.lseek(f, 0, 1) == i + 1 == os.fstat(f).st_size for i, f in enumerate(fs)))"),
        "True\n",
    ),
    case(
        "P36",
        "descriptors of /proc and /sys",
        TRIAL,
        service("a = open('/proc/self/status'); b = open('/proc/meminfo'); c = open('/sys/kernel/mm/transparent_hugepage"
                "/enabled'); d = os.open('/proc/self/fd', os.O_RDONLY); [x.readline() for x in (a, b)]",
                "a.seek(0); b.seek(0); say(f'Pid:\\t{os.getpid()}\\n' in a.read(), b.readline()[:8], '[' in c.read(),"
                " len(os.listdir(d)) > 3)"),
        "True MemTotal True True\n",
    ),
    case(
        "P37",
        "descriptors of /dev/null, zero, urandom and full",
        TRIAL,
        service("n, z, u, f = (os.open('/dev/' + k, os.O_RDWR) for k in ('null', 'zero', 'urandom', 'full'))",
                "try: os.write(f, b'x')\nexcept OSError as why: e = why.errno\n"
                "say(os.read(n, 9), os.read(z, 3), len(os.read(u, 9)), e == errno.ENOSPC, os.write(n, b'abc'))"),
        " \0\0\0 9 True 3\n",
    ),
    case(
        "W21",
        "log that grows while it is captured: size equals the writer's offset",
        CRIU + "1258",
        service("f = open('log', 'wb', 0); n = 0\ndef write():\n    global n\n    while not os.path.exists('stop'):"
                " f.write(b'x' * 9); n += 9; time.sleep(0.0005)\nt = threading.Thread(target=write); t.start()",
                "m = n\nwhile n == m: time.sleep(0.001)\n"
                "open('stop', 'w'); t.join(); say(os.path.getsize('log') == f.tell() == n)"),
        "True\n",
        twin=False,
    ),
    Case(
        ("W23",), "image files changed, removed, and the mode of an image directory", "snapshot issue 142",
        "echo '#x' >> /etc/bash.bashrc; rm /etc/issue; chmod 700 /usr/share; echo none > up",
        "tail -1 /etc/bash.bashrc; ls /etc/issue 2>/dev/null; stat -c %a /usr/share", "#x\n700\n", twin=False,
    ),
    Case(
        ("W24",), "image directory removed and made again stays opaque", "containers/storage pull 141",
        "rm -rf /etc/apt; mkdir /etc/apt; : > /etc/apt/only; echo none > up",
        "ls -A /etc/apt; stat -c %F /etc/apt/only", "only\nregular empty file\n", twin=False,
    ),
    case(
        "W26",
        "extended attributes and file capabilities, also on a tmpfs",
        "https://github.com/checkpoint-restore/criu/pull/3159",
        service("cap = struct.pack('<IIIII', 0x02000001, 1 << 13, 0, 0, 0)\n"
                "for n in ('x', '/dev/shm/w26'):\n    open(n, 'w').write('data'); os.setxattr(n, 'user.k', b'v')\n"
                "os.setxattr('x', 'security.capability', cap); os.utime('/dev/shm/w26', ns=(1, 1234567890123456789))",
                "n = '/dev/shm/w26'\nsay(os.getxattr('x', 'user.k'), os.getxattr('x', 'security.capability') == cap,"
                " os.getxattr(n, 'user.k'), os.stat(n).st_mtime_ns)"),
        "v True v 1234567890123456789\n",
    ),
    case(
        "W28 P38",
        "flock held",
        "https://github.com/checkpoint-restore/criu/pull/1357",
        service("f = open('k', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
                ask="flock -n k true || echo locked"),
        "\nlocked\n",
    ),
    case(
        "P39",
        "POSIX record lock held",
        TRIAL,
        service("f = open('k', 'w+b'); f.write(b'abc'); f.flush(); fcntl.lockf(f, fcntl.LOCK_EX, 2, 1)",
                ask="python3 -c \"import fcntl, os; f = open('k', 'r+b'); fcntl.lockf(f, 6, 1, 0); print('free')\n"
                    "try: fcntl.lockf(f, 6, 1, 1)\nexcept OSError: print('locked')\""),
        "\nfree\nlocked\n",
    ),
    case(
        "P40",
        "open file description lock held",
        TRIAL,
        service("f = open('k', 'w+b'); fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))",
                ask="python3 -c \"import fcntl; f = open('k', 'r+b')\n"
                    "try: fcntl.lockf(f, 6)\nexcept OSError: print('locked')\""),
        "\nlocked\n",
    ),
    case(
        "W30",
        "lease held on a file",
        CRIU + "154",
        service("open('k', 'w').close(); f = open('k'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
                "say(fcntl.fcntl(f, fcntl.F_GETLEASE) == fcntl.F_RDLCK)"),
        "True\n",
    ),
    case(
        "P41",
        "SQLite in WAL mode, idle",
        TRIAL,
        service("c = sqlite3.connect('d', isolation_level=None); c.execute('pragma journal_mode=wal')\n"
                "c.execute('create table t(x)'); c.execute('insert into t values(7)')",
                "c.execute('insert into t values(8)'); say(c.execute('select sum(x) from t').fetchone()[0],"
                " c.execute('pragma integrity_check').fetchone()[0])"),
        "15 ok\n",
        unless="lock_on_mapped_file",
    ),
    case(
        "W29 P42",
        "SQLite in the middle of a write transaction",
        "https://github.com/checkpoint-restore/criu/pull/1357",
        service("c = sqlite3.connect('d', isolation_level=None); c.execute('pragma journal_mode=wal')\n"
                "c.execute('create table t(x)'); c.execute('begin immediate'); c.execute('insert into t values(1)')\n"
                "def other(do): return subprocess.run([sys.executable, '-c', \"import sqlite3; c = sqlite3.connect('d', timeout=0);\""
                " + f'print(c.execute(\"{do}\").fetchone())'], capture_output=True, text=True)",
                "see = lambda: other('select count(*) from t').stdout.strip()\n"
                "a = see(); b = 'locked' if 'database is locked' in other('begin immediate').stderr else 'free'\n"
                "c.execute('commit'); say(a, b, see(), c.execute('pragma integrity_check').fetchone()[0])"),
        "(0,) locked (1,) ok\n",
        unless="lock_on_mapped_file",
    ),
    case(
        "W29b",
        "record lock on a file that the process maps",
        "found by this run",
        service("f = open('k', 'w+b'); f.truncate(8192); m = mmap.mmap(f.fileno(), 8192); fcntl.lockf(f, fcntl.LOCK_EX, 2, 1)",
                ask="python3 -c \"import fcntl, os; f = open('k', 'r+b'); fcntl.lockf(f, 6, 1, 0); print('free')\n"
                    "try: fcntl.lockf(f, 6, 1, 1)\nexcept OSError: print('locked')\""),
        "\nfree\nlocked\n",
        unless="lock_on_mapped_file",
    ),
    Case(
        ("W58",), "file made between two checkpoints", "podman issue 4606, E2B issue 884",
        "echo 1 > one; echo none > up", "cat one; cat two 2>/dev/null || true", "1\n", "echo 2 > two", twin=False,
    ),
]  # fmt: skip
