"""Processes, threads, terminals, signals, clocks."""

# ruff: noqa: E501  (programs of the sandbox)
from __future__ import annotations

from tests.conformance.model import CRIU, TRIAL, Case, case, service

CASES = [
    Case(
        ("W1",), "background service of an action", "gvisor issue 11544, podman issue 19325",
        "(while :; do date +%s%N > c.tmp; mv c.tmp c; sleep 0.02; done) & P=$!; until [ -s c ]; do :; done; echo $P > up",
        "kill -0 $(cat up) && a=$(cat c); until [ \"$(cat c)\" != \"$a\" ]; do :; done; echo goes on", "goes on\n", twin=False,
    ),
    Case(
        ("W3",), "orphan of a finished action", "runc pull 4696",
        "setsid sh -c 'sleep 100000 & echo $! > o'; P=$(cat o); echo $P > up",
        "grep -c '^PPid:.1$' /proc/$(cat o)/status; tr '\\0' ' ' < /proc/$(cat o)/cmdline", "1\nsleep 100000 ",
    ),
    case(
        "W9 P28",
        "zombies that their parent does not reap",
        CRIU + "1753",
        service("k = os.fork()\nif k == 0: os._exit(7)\nos.waitid(os.P_PID, k, os.WEXITED | os.WNOWAIT)\n"
                "j = os.fork()\nif j == 0: os.kill(os.getpid(), 9)\nos.waitid(os.P_PID, j, os.WEXITED | os.WNOWAIT)",
                "say(open(f'/proc/{k}/stat').read().split()[2], os.waitpid(k, 0)[1] >> 8, os.waitpid(j, 0)[1])"),
        "Z 7 9\n",
    ),
    case(
        "W10 P27",
        "many threads, names and a lock between them",
        CRIU + "2508",
        service("n = [0] * 8; lock = threading.Lock(); go = threading.Event(); lock.acquire()\n"
                "def work(i):\n    libc.prctl(15, b'worker%d' % i, 0, 0, 0); go.wait()\n    with lock: n[i] += 1\n"
                "    threading.Event().wait()\n"
                "for i in range(8): threading.Thread(target=work, args=(i,), daemon=True).start()",
                "go.set(); lock.release()\nwhile sum(n) < 8: time.sleep(0.01)\n"
                "say(len(os.listdir('/proc/self/task')), sorted(open(f'/proc/self/task/{t}/comm').read().strip() for t in"
                " os.listdir('/proc/self/task'))[-1])"),
        "9 worker7\n",
    ),
    Case(
        ("W11",), "counter that must not start again from zero", "docker/for-linux issue 1192",
        "(i=0; while :; do i=$((i+1)); echo $i >> n; sleep 0.002; done) & P=$!; until [ -s n ]; do :; done; echo $P > up",
        "m=$(wc -l < n); until [ $(wc -l < n) -gt $m ]; do :; done; awk '$1 != NR { exit 1 }' n && echo no gap", "no gap\n",
        twin=False,
    ),
    case(
        "P57",
        "file and memory are of one instant: a log without a gap",
        TRIAL,
        service("f = open('log', 'w'); n = 0\ndef write():\n    global n\n    while True: n += 1; f.write(f'{n}\\n'); f.flush(); time.sleep(0.0003)\n"
                "threading.Thread(target=write, daemon=True).start()\nwhile n < 1000: time.sleep(0.001)",
                "m = n\nwhile n < m + 1000: time.sleep(0.001)\n"
                "rows = open('log').read().split('\\n')[:-1]; say(rows == [str(i + 1) for i in range(len(rows))])\nos._exit(0)"),
        "True\n",
        twin=False,
    ),
    case(
        "P29",
        "pidfds, of a living and of a dead process",
        TRIAL,
        service("k = os.fork()\nif k == 0: signal.pause()\na = os.pidfd_open(k)",
                "signal.pidfd_send_signal(a, 9); r = select.select([a], [], [], 10)[0]; say(r == [a], os.waitpid(k, 0)[1])",
                up="up(k)"),
        "True 9\n",
    ),
    Case(
        ("P30",), "Python at its prompt", TRIAL,
        "mkfifo in; exec 7<>in; python3 -i -q <in >out 2>err 7>&- & P=$!; "
        "echo 'import sys; x = 41; print(x, flush=True)' >&7; wait_for out; echo $P > up",
        "echo 'print(x + 1, flush=True)' >&7; until [ $(wc -l < out) -gt 1 ]; do :; done; cat out", "41\n42\n", twin=False,
    ),
    case(
        "P31",
        "bash on a terminal",
        TRIAL,
        service("import pty, termios\npid, fd = pty.fork()\nif pid == 0: os.execvp('bash', ['bash', '--norc'])\n"
                "def ask(c, till):\n    os.write(fd, c); d = b''\n    while till not in d: d += os.read(fd, 999)\n    return d\n"
                "ask(b'X=41; cd /var; stty -echo rows 33 cols 77; echo do\"\"ne\\n', b'done\\r')",
                "d = ask(b'echo \"<$X $PWD $(stty size) $(tty)>\"\\n', b'>\\r'); say(d[d.index(b'<'):d.index(b'>') + 1])",
                up="up(pid)"),
        "<41 /var 33 77 /dev/pts/0>\n",
    ),
    case(
        "P32",
        "tmux: a server, a client that went away, a shell in it",
        TRIAL,
        ("export TMUX_TMPDIR=$PWD; tmux -f /dev/null new-session -d -s t -x 80 -y 24 'bash --norc'; "
         "tmux send-keys -t t 'X=41; cd /var; printf re; echo ady' Enter; "
         "for _ in $(seq 6000); do tmux capture-pane -p -t t | grep -q ^ready && break; sleep 0.01; done; "
         "tmux list-panes -F '#{pid} #{pane_pid}' > up.tmp && mv up.tmp up",
         "export TMUX_TMPDIR=$PWD; tmux send-keys -t t 'echo \"<$X $PWD>\"' Enter; "
         "for _ in $(seq 6000); do tmux capture-pane -p -t t | grep -q '^<41 /var>' && break; sleep 0.01; done; "
         "tmux capture-pane -p -t t | grep '^<'; tmux ls -F '#{session_windows}'"),
        "<41 /var>\n1\n",
    ),
    Case(
        ("W13",), "tail -f: a watched file", CRIU + "2854",
        "echo one > l; tail -n +1 -f l > out 2>err & P=$!; wait_for out; echo $P > up",
        "echo two >> l; for _ in $(seq 6000); do grep -q two out && break; sleep 0.01; done; cat out", "one\ntwo\n",
        unless="watch", twin=False,
    ),
    case(
        "W14 P47",
        "watches on a folder of the image, on one of its own and on a file",
        CRIU + "2368",
        service("f = libc.inotify_init1(0); open('own', 'w'); os.mkdir('d')\n"
                "w = [libc.inotify_add_watch(f, p, 0x102) for p in (b'/srv', b'd', b'own')]",
                "open('/srv/new', 'w'); open('d/in', 'w'); open('own', 'a').write('more'); seen = set()\n"
                "while len(seen) < 3:\n    d = os.read(f, 4096); at = 0\n    while at < len(d): seen.add(struct.unpack_from('i', d, at)[0]);"
                " at += 16 + struct.unpack_from('I', d, at + 12)[0]\nsay(sorted(seen) == sorted(w))"),
        "True\n",
        unless="watch",
    ),
    case(
        "B3",
        "signals: blocked, pending with their value, ignored; timers that go on",
        "criu zdtm kinds",
        service("signal.pthread_sigmask(0, [10, 12, 40]); os.kill(os.getpid(), 10)\n"
                "libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(77)); libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(78))\n"
                "signal.signal(1, signal.SIG_IGN); got = []; signal.signal(14, lambda *a: got.append(14))\n"
                "signal.setitimer(0, 5000, 0); t = ctypes.c_void_p(); ev = struct.pack('qii48x', 5, 40, 0)\n"
                "r = libc.timer_create(1, ev, ctypes.byref(t))\n"
                "libc.timer_settime(t, 0, struct.pack('4q', 0, 0, 9000, 0), None)",
                "left = signal.getitimer(0)[0]; b = ctypes.create_string_buffer(32); libc.timer_gettime(t, b)\n"
                "i = [signal.sigtimedwait([s], 0) for s in (10, 40, 40)]\n"
                "say([x.si_signo for x in i], signal.getsignal(1) == signal.SIG_IGN, 4000 < left <= 5000, r,"
                " 8000 < struct.unpack('4q', b.raw)[2] <= 9000)"),
        "[10, 40, 40] True True 0 True\n",
    ),
    case(
        "B4",
        "priority, limits, umask, subreaper, parent-death signal, no-new-privileges, ambient capabilities",
        "criu zdtm kinds",
        service("import resource\nlibc.prctl(36, 1, 0, 0, 0); os.umask(0o27); resource.setrlimit(7, (321, 400))\n"
                "os.setpriority(0, 0, 7); libc.prctl(1, 9, 0, 0, 0)",
                "v = ctypes.c_int(); libc.prctl(37, ctypes.byref(v), 0, 0, 0); w = ctypes.c_int(); libc.prctl(2, ctypes.byref(w))\n"
                "say(v.value, w.value, os.getpriority(0, 0), resource.getrlimit(7), oct(os.umask(0)))"),
        "1 9 7 (321, 400) 0o27\n",
    ),
    case(
        "B9",
        "program of another user, with groups of its own",
        "every image with a USER",
        service("os.chmod('.', 0o777); k = os.fork()\n"
                "if k == 0:\n    os.setgroups([7, 8]); os.setresgid(1000, 1001, 1002); os.setresuid(1000, 1000, 1000)\n"
                "    put('ids', '-'); told(); put('ids', f'{os.getgroups()} {os.getresgid()} {os.getresuid()}\\n'); signal.pause()\n"
                "while not os.path.exists('ids'): time.sleep(0.01)",
                "while open('ids').read() == '-': time.sleep(0.01)\nsay()", ask="cat ids", up="up(k)"),
        "\n[7, 8] (1000, 1001, 1002) (1000, 1000, 1000)\n",
        unless="other_user",
    ),
    case(
        "B5",
        "scheduling policy",
        "criu zdtm kinds",
        service("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))", "say(os.sched_getscheduler(0) == os.SCHED_BATCH)"),
        "True\n",
    ),
    case(
        "B6",
        "system call that waits without end: may end once with EINTR (declared), never wrongly",
        "found by this run",
        service("got = []\ndef wait():\n    r = libc.poll(None, 0, -1); got.append((r, ctypes.get_errno()))\n"
                "threading.Thread(target=wait, daemon=True).start(); time.sleep(0.05)",
                "say(got in ([], [(-1, errno.EINTR)]))"),
        "True\n",
        twin=False,
    ),
    case(
        "P55",
        "monotonic clock goes on from the capture: never back, never further than the wall clock",
        TRIAL,
        service("w = time.time(); t = time.monotonic(); bad = []\ndef beat():\n    global t, w\n    while True:\n"
                # The wall clock before and after: nobody knows how long a process stands still between two looks.
                "        u = time.time(); n = time.monotonic(); v = time.time()\n"
                "        if not 0 <= n - t <= v - w + 0.05: bad.append((n - t, v - w))\n"
                "        t, w = n, u; time.sleep(0.005)\nthreading.Thread(target=beat, daemon=True).start()",
                "m = t\nwhile t <= m + 0.02: time.sleep(0.005)\nsay(bad)\nos._exit(0)"),
        "[]\n",
        twin=False,
    ),
    case(
        "P56",
        "host name, of the kernel and of the file",
        TRIAL,
        service("n = os.uname().nodename",
                "say(os.uname().nodename == n == open('/etc/hostname').read().strip() != '')", ask="cat /etc/hosts | grep -c localhost"),
        "True\n2\n",
    ),
    Case(
        ("W55",), "random numbers after a restore: the same for all, by design and stated", "firecracker pull 2138",
        "python3 -c 'from lib import *; import random; random.seed(5); a = random.random(); up(); told(); say(random.random())' & wait_up",
        "touch go; wait_out; cat out", "0.7417869892607294\n",
    ),
    case(
        "W37 P49",
        "io_uring (and Landlock): not offered, so that programs fall back",
        CRIU + "2131",
        service("r = [(libc.syscall(n, 8, ctypes.create_string_buffer(120)), errno.errorcode[ctypes.get_errno()]) for n in"
                " (425, 444)]", "say(*r)"),
        "(-1, 'ENOSYS') (-1, 'ENOSYS')\n",
    ),
    case(
        "W44",
        "MPTCP: not offered, so that programs fall back to TCP",
        CRIU + "2655",
        service("try: socket.socket(2, 1, 262); e = 0\nexcept OSError as why: e = why.errno\ns = socket.create_server(('', 2144))",
                "say(errno.errorcode[e])"),
        "EPROTONOSUPPORT\n",
    ),
    case(
        "P52",
        "a user namespace of its own: not offered",
        TRIAL,
        service("r = subprocess.run(['unshare', '-U', 'true'], capture_output=True)", "say(r.returncode, b'not permitted' in r.stderr)"),
        "1 True\n",
    ),
]  # fmt: skip
