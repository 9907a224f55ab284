"""Sockets, pipes and everything that two programs of a sandbox talk through."""

# ruff: noqa: E501  (programs of the sandbox)
from __future__ import annotations

from tests.conformance.model import CRIU, TRIAL, case, service

PAIR = "s = socket.create_server(('127.0.0.1', {port})); c = socket.create_connection(('127.0.0.1', {port}))\n"

CASES = [
    case(
        "P7",
        "pipe and FIFO with data in them",
        TRIAL,
        service("r, w = os.pipe(); os.write(w, b'pipe'); os.mkfifo('f'); f = os.open('f', os.O_RDWR); os.write(f, b'fifo')",
                "os.write(w, b'!'); say(os.read(r, 99), os.read(f, 99))"),
        "pipe! fifo\n",
    ),
    case(
        "P8",
        "TCP listener, IPv4",
        TRIAL,
        service("s = socket.create_server(('0.0.0.0', 2008)); s.setsockopt(6, socket.TCP_DEFER_ACCEPT, 0)",
                "c = socket.create_connection(('127.0.0.1', 2008)); a = s.accept()[0]; a.send(b'four')\n"
                "say(c.recv(9), s.getsockopt(1, socket.SO_REUSEADDR))"),
        "four 1\n",
    ),
    case(
        "P9",
        "TCP listener, IPv6",
        TRIAL,
        service("s = socket.create_server(('::', 2009), family=socket.AF_INET6)",
                "c = socket.create_connection(('::1', 2009)); s.accept()[0].send(b'six'); say(c.recv(9))"),
        "six\n",
    ),
    case(
        "P10",
        "connection in TIME_WAIT",
        TRIAL,
        service(PAIR.format(port=2010) + "a = s.accept()[0]; a.close(); c.recv(1); c.close()",
                "c = socket.create_connection(('127.0.0.1', 2010)); s.accept()[0].send(b'new'); say(c.recv(9))"),
        "new\n",
    ),
    case(
        "P11",
        "UDP sockets, bound and connected, with a datagram unread",
        TRIAL,
        service("s = socket.socket(2, 2); s.bind(('127.0.0.1', 2011)); c = socket.socket(2, 2)\n"
                "c.connect(('127.0.0.1', 2011))",
                "c.send(b'two'); d, peer = s.recvfrom(9); s.sendto(b'back', peer); say(d, c.recv(9))"),
        "two back\n",
    ),
    case(
        "W40 P43",
        "established TCP over loopback with an unread byte",
        CRIU + "589",
        service(PAIR.format(port=2043) + "a = s.accept()[0]; c.send(b'q'); a.setsockopt(6, socket.TCP_NODELAY, 1)",
                "q = a.recv(9); a.send(b'r'); c.send(b'more'); say(q, c.recv(9), a.recv(9),"
                " a.getsockopt(6, socket.TCP_NODELAY))"),
        "q r more 1\n",
    ),
    case(
        "P44",
        "connection in CLOSE_WAIT with data unread",
        TRIAL,
        service(PAIR.format(port=2044) + "a = s.accept()[0]; c.send(b'last'); c.close()",
                "say(a.recv(9), a.recv(9))"),
        "last \n",
    ),
    case(
        "W47 P34",
        "python -m http.server",
        CRIU + "2804",
        ("echo page > index.html; python3 -m http.server 2047 >/dev/null 2>err & P=$!\n"
         "for _ in $(seq 6000); do (: < /dev/tcp/127.0.0.1/2047) 2>/dev/null && break; sleep 0.01; done; echo $P > up",
         "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:2047/').read().decode(), end='')\""),
        "page\n",
    ),
    case(
        "W27 P12",
        "unix listener in the file system, and a FIFO",
        CRIU + "406",
        service("os.mkfifo('f', 0o640); s = socket.socket(1); s.bind('s'); s.listen()",
                "c = socket.socket(1); c.connect(HOME + '/s'); s.accept()[0].send(b'hi'); say(c.recv(9))",
                ask="echo through > f & cat f; stat -c '%F %a' f s"),
        "hi\nthrough\nfifo 640\nsocket 755\n",
    ),
    case(
        "P13",
        "connected unix sockets with data queued",
        TRIAL,
        service("s = socket.socket(1); s.bind('s'); s.listen(); c = socket.socket(1); c.connect('s'); a = s.accept()[0]\n"
                "c.send(b'one'); a.send(b'two')",
                "c.send(b'!'); say(a.recv(9), c.recv(9))"),
        "one! two\n",
    ),
    case(
        "P14",
        "abstract unix listener",
        TRIAL,
        service("s = socket.socket(1); s.bind('\\0p14'); s.listen()",
                "c = socket.socket(1); c.connect('\\0p14'); s.accept()[0].send(b'abstract'); say(c.recv(9))"),
        "abstract\n",
    ),
    case(
        "P15",
        "unix datagram sockets with a datagram queued",
        TRIAL,
        service("s = socket.socket(1, 2); s.bind('s'); c = socket.socket(1, 2); c.connect('s'); c.send(b'd1'); c.send(b'd2')",
                "say(s.recv(9), s.recv(9))"),
        "d1 d2\n",
    ),
    case(
        "P16",
        "socket pairs: stream, datagram, sequenced packets",
        TRIAL,
        service("ps = [socket.socketpair(1, k) for k in (1, 2, 5)]\nfor a, _ in ps: a.send(b'x')",
                "for a, b in ps: b.send(b'y')\nsay(*(b.recv(9) + a.recv(9) for a, b in ps))"),
        "xy xy xy\n",
    ),
    case(
        "P17",
        "descriptor in flight (SCM_RIGHTS)",
        TRIAL,
        service("a, b = socket.socketpair(); f = os.open('f', os.O_RDWR | os.O_CREAT); os.write(f, b'sent'); os.lseek(f, 1, 0)\n"
                "socket.send_fds(a, [b'm'], [f]); os.close(f)",
                "m, fds, _, _ = socket.recv_fds(b, 9, 2); say(m, os.read(fds[0], 9))"),
        "m ent\n",
    ),
    case(
        "P18",
        "netlink socket",
        TRIAL,
        service("s = socket.socket(16, 3, 0); s.bind((0, 0))",
                "s.send(struct.pack('<IHHIIB3x', 20, 18, 0x301, 1, 0, 0)); say(b'lo\\0' in s.recv(65536))"),
        "True\n",
    ),
    case(
        "W45 P19",
        "ICMP by raw and by ping socket",
        CRIU + "2557",
        service("r = socket.socket(2, 3, 1); d = socket.socket(2, 2, 1)\n"
                "def ping(s):\n    h = struct.pack('!BBHHH', 8, 0, 0, 77, 1); v = sum(struct.unpack('!4H', h))\n"
                "    s.sendto(struct.pack('!BBHHH', 8, 0, ~(v + (v >> 16)) & 65535, 77, 1), ('127.0.0.1', 0))",
                "ping(r); ping(d); say(len(r.recv(99)) > 20, d.recv(99)[0])"),
        "True 0\n",
    ),
    case(
        "P20",
        "epoll, eventfd, timerfd and signalfd together",
        TRIAL,
        service("e = select.epoll(); ev = os.eventfd(5); r, w = os.pipe(); e.register(ev, 1); e.register(r, 1)\n"
                "signal.pthread_sigmask(0, [10]); m = ctypes.create_string_buffer((1 << 9).to_bytes(8, 'little'), 8)\n"
                "sf = libc.signalfd(-1, m, 0); e.register(sf, 1)\n"
                "tf = libc.timerfd_create(1, 0); libc.timerfd_settime(tf, 0, struct.pack('4q', 0, 50000000, 1, 0), None)\n"
                "e.register(tf, 1); os.kill(os.getpid(), 10)",
                "os.write(w, b'x'); seen = set()\nwhile len(seen) < 4: seen |= {fd for fd, _ in e.poll()}\n"
                "say(seen == {ev, r, sf, tf}, os.eventfd_read(ev), os.read(sf, 128)[0])"),
        "True 5 10\n",
    ),
    case(
        "B1",
        "many peers: a server with eight connected clients in processes of their own",
        "mini-swe-agent and Jupyter kernels",
        service("s = socket.create_server(('127.0.0.1', 2101)); kids = []\nfor i in range(8):\n    k = os.fork()\n    if k == 0:\n"
                "        c = socket.create_connection(('127.0.0.1', 2101)); c.send(bytes([i])); "
                "c.send(bytes([c.recv(1)[0] + 1])); signal.pause()\n    kids.append(k)\n"
                "cs = [s.accept()[0] for _ in kids]; ids = [c.recv(1)[0] for c in cs]",
                "for c, i in zip(cs, ids): c.send(bytes([i]))\nsay(all(c.recv(1)[0] == i + 1 for c, i in zip(cs, ids)))",
                up="up(*kids)"),
        "True\n",
    ),
]  # fmt: skip
