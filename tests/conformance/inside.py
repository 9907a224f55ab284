"""What is put into a sandbox before the cases start: a Python module, two shell functions, and a look at processes."""

from __future__ import annotations

LIB = r"""
import ctypes, errno, fcntl, mmap, os, select, signal, socket, sqlite3, struct, subprocess, sys, threading, time
HOME = os.getcwd()
libc = ctypes.CDLL(None, use_errno=True)
def put(name, text):
    with open(f"{HOME}/{name}.tmp", "w") as f: f.write(text)
    os.rename(f"{HOME}/{name}.tmp", f"{HOME}/{name}")
def up(*others):
    put("up", " ".join(map(str, (os.getpid(), *others))))
def told():
    while not os.path.exists(HOME + "/go"): time.sleep(0.01)
def say(*what):
    put("out", " ".join(w.decode() if isinstance(w, bytes) else str(w) for w in what) + "\n")
"""

SHELL = r"""
export PYTHONPATH=/c PYTHONDONTWRITEBYTECODE=1
wait_up() { wait_for up; }; wait_out() { wait_for out; }
wait_for() {
  for _ in $(seq 9000); do [ -s "$1" ] && return 0; sleep 0.01; done
  echo "no $1 in $PWD" >&2; tail -5 err >&2; return 1
}
"""

# Everything of a process that must be the same afterwards. Numbers of pipes and sockets are new after a restore, and
# so are the ones of timers; what they are is not.
LOOK = r"""
import glob, json, os, re, sys
KEPT = ("Name", "Umask", "PPid", "NSpid", "Uid", "Gid", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "CapInh",
        "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
def readable(path):
    try: return open(path).readlines()
    except PermissionError: return []
def look(pid):
    base = f"/proc/{pid}/"
    rows = dict(r.split(":\t", 1) for r in open(base + "status").read().splitlines() if ":\t" in r)
    stat = open(base + "stat").read()
    tail = stat[stat.rindex(")") + 2:].split()
    out = {key: rows[key] for key in KEPT if key in rows}
    out["group, session, tty"] = tail[2:5]
    out["nice, policy"] = [tail[16], tail[38]]
    for name in ("cwd", "root", "exe"):
        try: out[name] = os.readlink(base + name)
        except OSError as why: out[name] = why.errno
    fds = {}
    try: numbers = sorted(os.listdir(base + "fd"), key=int)
    except PermissionError: numbers = []  # of another user
    for fd in numbers:
        try:
            link = re.sub(r"\[\d+\]", "[]", os.readlink(base + "fd/" + fd))
            info = dict(r.split(":\t") for r in open(base + "fdinfo/" + fd).read().splitlines()[:2])
        except (FileNotFoundError, PermissionError): continue
        link = re.sub(r"#\d+|link_remap\.\d+|\.cr\.[0-9a-f.]+ghost|\.cr_link| \(deleted\)", "", link)
        pos = info["pos"] if link.startswith("/") and not link.startswith("/dev/") else ""
        fds[fd] = [link, oct(int(info["flags"], 8) & ~0o100000), pos]  # O_LARGEFILE means nothing on 64 bits
    out["fds"] = fds
    maps = []
    for row in readable(base + "maps"):  # neighbours that the kernel could have kept as one are one here
        span, mode, at, *_, = row.split(None, 5)
        what = row.split(None, 5)[5].strip() if len(row.split(None, 5)) > 5 else ""
        low, high = (int(x, 16) for x in span.split("-"))
        if maps and maps[-1][1:] == [low, mode, what]: maps[-1][1] = high
        else: maps.append([low, high, mode, what])
    out["maps"] = [[f"{m[0]:x}-{m[1]:x}", m[2]] for m in maps]
    out["args"] = open(base + "cmdline").read()
    try: out["environ"] = open(base + "environ").read()
    except PermissionError: pass
    for name in ("limits", "oom_score_adj", "timerslack_ns", "personality"):
        try: out[name] = open(base + name).read()
        except OSError: pass
    out.pop("oom_score_adj")  # the runtime's shim sets it: a declared difference
    return out
seen = {}
for path in sorted(glob.glob("/c/*/up")):
    if os.path.basename(os.path.dirname(path)) in sys.argv[1:]:
        seen[path[3:-3]] = {pid: look(pid) for pid in open(path).read().split() if pid.isdigit()}
json.dump(seen, sys.stdout)
"""
