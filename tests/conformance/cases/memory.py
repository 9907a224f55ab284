"""Memory of every kind, shared or not."""

# ruff: noqa: E501  (programs of the sandbox)
from __future__ import annotations

from tests.conformance.model import CRIU, TRIAL, case, service

CASES = [
    case(
        "P21",
        "memfd, mapped and sealed",
        TRIAL,
        service("f = os.memfd_create('m', os.MFD_ALLOW_SEALING); os.write(f, b'memfd' * 2000); m = mmap.mmap(f, 10000)\n"
                "m[:3] = b'MEM'; del m; fcntl.fcntl(f, 1033, 2 | 4)",
                "say(os.pread(f, 5, 0), fcntl.fcntl(f, 1034), os.fstat(f).st_size)"),
        "MEMfd 6 10000\n",
    ),
    case(
        "W32 P22",
        "file in /dev/shm, open and mapped",
        CRIU + "2674",
        service("f = open('/dev/shm/a', 'w+b'); f.truncate(1 << 20); m = mmap.mmap(f.fileno(), 1 << 20); m[:3] = b'hey'",
                "m[3:6] = b'you'; say(open('/dev/shm/a', 'rb').read(6), os.path.getsize('/dev/shm/a'))"),
        "heyyou 1048576\n",
    ),
    case(
        "W34 P23",
        "System V shared memory, semaphore and message queue",
        "podman issue 12277",
        service("libc.shmat.restype = ctypes.c_void_p; i = libc.shmget(34, 4096, 0o1666); a = libc.shmat(i, None, 0)\n"
                "ctypes.memmove(a, b'shared', 6); loose = libc.shmget(35, 8192, 0o1600); b = libc.shmat(loose, None, 0)\n"
                "ctypes.memmove(b, b'loose', 5); libc.shmdt(ctypes.c_void_p(b))\n"
                "s = libc.semget(34, 1, 0o1600); libc.semctl(s, 0, 16, 7)\n"
                "q = libc.msgget(34, 0o1600); libc.msgsnd(q, struct.pack('q', 3) + b'message', 7, 0)",
                "b = libc.shmat(libc.shmget(35, 0, 0), None, 0); m = ctypes.create_string_buffer(99)\n"
                "n = libc.msgrcv(libc.msgget(34, 0), m, 80, 3, 0o4000)\n"
                "say(ctypes.string_at(a, 6), ctypes.string_at(b, 5), libc.semctl(s, 0, 12), m.raw[8:8 + n])"),
        "shared loose 7 message\n",
    ),
    case(
        "P24",
        "multiprocessing: lock, value, and a worker that waits for it",
        TRIAL,
        service("import multiprocessing as mp\nmp.set_start_method('fork'); lock = mp.Lock(); v = mp.Value('i', 41); lock.acquire()\n"
                "def work():\n    with lock: v.value += 1\np = mp.Process(target=work); p.start()",
                "lock.release(); p.join(120); say(v.value, p.exitcode)", up="up(p.pid)"),
        "42 0\n",
    ),
    case(
        "P25",
        "anonymous shared memory across a fork",
        TRIAL,
        service("m = mmap.mmap(-1, 1 << 20); m[:2] = b'ab'; k = os.fork()\n"
                "if k == 0:\n    told(); m[2:4] = b'cd'; signal.pause()",
                "while m[2:4] != b'cd': time.sleep(0.01)\nsay(m[:4])", up="up(k)"),
        "abcd\n",
    ),
    case(
        "W35",
        "tmpfs that holds much",
        CRIU + "529",
        service("import hashlib, random\nd = random.Random(1).randbytes(1 << 20)\n"
                "for i in range(16): open(f'/dev/shm/b{i}', 'wb').write(d)\n"
                "os.mkdir('/dev/shm/d'); os.link('/dev/shm/b1', '/dev/shm/d/hard'); os.symlink('b1', '/dev/shm/soft')",
                "s = os.stat('/dev/shm/d/hard'); say({hashlib.sha256(open(f'/dev/shm/b{i}', 'rb').read()).digest() for i in range(16)}"
                " == {hashlib.sha256(d).digest()}, s.st_nlink, os.readlink('/dev/shm/soft'))"),
        "True 2 b1\n",
    ),
    case(
        "W36",
        "guard pages",
        CRIU + "2626",
        service("m = mmap.mmap(-1, 16384); a = ctypes.addressof(ctypes.c_char.from_buffer(m)); ctypes.memset(a, 7, 16384)\n"
                "r = libc.madvise(ctypes.c_void_p(a + 4096), 4096, 102)",
                "k = os.fork()\nif k == 0: ctypes.string_at(a + 4096, 1)\n_, st = os.waitpid(k, 0)\n"
                "say(r, os.WTERMSIG(st) == signal.SIGSEGV, set(ctypes.string_at(a, 4096)), set(ctypes.string_at(a + 8192, 99)))"),
        "0 True {7} {7}\n",
    ),
    case(
        "W39",
        "large heap",
        CRIU + "2519",
        service("import hashlib, random\nb = bytearray(random.Random(2).randbytes(1 << 20) * 160); d = hashlib.sha256(b).digest()",
                "say(hashlib.sha256(b).digest() == d, len(b) >> 20)"),
        "True 160\n",
    ),
    case(
        "B2",
        "protection and advice of mappings: none, read-only, locked, not to be forked, holes",
        "criu zdtm kinds",
        service("m = mmap.mmap(-1, 6 * 4096); a = ctypes.addressof(ctypes.c_char.from_buffer(m)); ctypes.memset(a, 9, 6 * 4096)\n"
                "libc.mprotect(ctypes.c_void_p(a), 4096, 0); libc.mprotect(ctypes.c_void_p(a + 4096), 4096, 1)\n"
                "libc.mlock(ctypes.c_void_p(a + 8192), 4096); libc.madvise(ctypes.c_void_p(a + 12288), 4096, 10)\n"
                "libc.munmap(ctypes.c_void_p(a + 16384), 4096)\n"
                "see = lambda: [r.split()[1] for r in open('/proc/self/maps') if a <= int(r.split('-')[0], 16) < a + 6 * 4096]\n"
                "was = see()",
                "rows = open('/proc/self/smaps').read(); say(see() == was, ' lo' in rows, ' dc' in rows,"
                " ctypes.string_at(a + 4096, 2))"),
        "True True True \t\t\n",
    ),
]  # fmt: skip
