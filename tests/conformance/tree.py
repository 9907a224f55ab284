# ruff: noqa: E501  (a program of the sandbox)
"""What an lstat, a read and the attributes say of every name of a tree: written apart from the code under test."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

Row = tuple[object, ...]

# Runs in a sandbox as root: one of everything that an upper layer can hold.
MAKE = r"""
mkdir -p /t/a/b && cd /t && echo one > one && ln one a/hard && ln one a/b/thrice && ln -s ../one a/soft && ln -s nowhere dangling
mkfifo -m 640 pipe; mknod null c 1 3; mknod disk b 7 99; chmod 600 disk
truncate -s 1G sparse; printf x | dd of=sparse bs=1 seek=500000000 conv=notrunc 2>/dev/null
truncate -s 300000 hole; printf end | dd of=hole bs=1 seek=299997 conv=notrunc 2>/dev/null
head -c 3000001 /dev/urandom > big; head -c 65536 /dev/urandom > edge; head -c 65537 /dev/urandom > edge1; : > empty
chmod 4755 one; chmod 2711 a; chmod 1777 a/b; chown 12:34 a; chown 4000000000:3999999999 small 2>/dev/null
head -c 200 /dev/urandom > small; chown 4000000:3999999 small; chmod 0 small
touch -d '2001-02-03 04:05:06.789012345' small; touch -hd '1969-12-31 23:59:58.5' a/soft; touch -d '2100-01-01 00:00:00.000000001' empty
echo changed >> /usr/lib/os-release; rm -f /etc/issue; chmod 700 /usr/share; rm -rf /etc/cron.d /etc/apt
mkdir /etc/cron.d; echo only > /etc/cron.d/only; mkdir /etc/apt; mv /etc/skel /etc/skel.moved 2>/dev/null || cp -a /etc/skel /etc/skel.copied
mv /etc/debconf.conf /etc/debconf.renamed; rm /bin/true; ln -s /bin/false /bin/true2; mkdir /etc/was-a-file; rm -rf /etc/was-a-file; echo x > /etc/was-a-file
rm /etc/host.conf; mkdir /etc/host.conf; echo in > /etc/host.conf/in; rm -rf /var/cache/debconf; echo file > /var/cache/debconf
printf odd > "$(printf '/t/od\td \n name')"; printf dash > /t/-rf; printf long > "/t/$(printf 'x%.0s' $(seq 255))"
python3 - <<'E'
import os, socket, struct
os.setxattr('/t/one', 'user.k', b'\x00v'); os.setxattr('/t/a', 'user.dir', b'd' * 3000)
os.setxattr('/t/big', 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 13, 0, 0, 0))
acl = struct.pack('<IHHIHHIHHIHHIHHI', 2, 1, 6, 0xffffffff, 2, 7, 1000, 4, 4, 0xffffffff, 0x10, 7, 0xffffffff, 0x20, 4, 0xffffffff)
os.setxattr('/t/edge', 'system.posix_acl_access', acl); os.setxattr('/t/a/b', 'system.posix_acl_default', acl)
s = socket.socket(1); s.bind('/t/sock'); open(b'/t/\xff\xfe invalid \x80', 'w').write('bytes')
top = b'/t/deep'; os.mkdir(top); os.chdir(top)
for i in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)
open('bottom', 'w').write('deep')
os.makedirs('/t/many')
for i in range(2000): open(f'/t/many/{i}', 'w').write(str(i) * 50)
E
"""


def manifest(top: Path) -> dict[bytes, Row]:
    """Every name below ``top`` on its own file system. Paths of any depth: by folder descriptors."""
    out: dict[bytes, Row] = {}
    inodes: dict[int, bytes] = {}
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _folder(fd, b"", os.fstat(fd).st_dev, out, inodes)
    finally:
        os.close(fd)
    return out


def _folder(fd: int, path: bytes, device: int, out: dict[bytes, Row], inodes: dict[int, bytes]) -> None:
    out[path or b"/"] = _row(b"/proc/self/fd/%d/." % fd, os.fstat(fd), path, inodes)
    for name in sorted(os.fsencode(name) for name in os.listdir(fd)):
        info = os.lstat(name, dir_fd=fd)
        here = path + b"/" + name
        if not stat.S_ISDIR(info.st_mode):
            out[here] = _row(b"/proc/self/fd/%d/" % fd + name, info, here, inodes)
            continue
        sub = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        try:
            if os.fstat(sub).st_dev == device:  # not into what is mounted there
                _folder(sub, here, device, out, inodes)
        finally:
            os.close(sub)


def _row(full: bytes, info: os.stat_result, path: bytes, inodes: dict[int, bytes]) -> Row:
    kind = stat.S_IFMT(info.st_mode)
    whiteout = kind == stat.S_IFCHR and info.st_rdev == 0
    linked = kind != stat.S_IFDIR and not whiteout and info.st_nlink > 1
    same = inodes.setdefault(info.st_ino, path) if linked else path
    attrs = {name: os.getxattr(full, name, follow_symlinks=False) for name in os.listxattr(full, follow_symlinks=False)}
    attrs.pop("trusted.overlay.origin", None)  # names the inode of the image's file: only a hint for inode numbers
    body, link, size, holes = "", b"", 0, False
    if kind == stat.S_IFREG:
        size, holes = info.st_size, info.st_blocks * 512 < info.st_size // 2
        body = _digest(full, size)
    elif kind == stat.S_IFLNK:
        link = os.readlink(full)
    device = info.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
    owner = (info.st_mode, info.st_uid, info.st_gid)
    return (*owner, size, info.st_mtime_ns, device, same, holes, body, link, tuple(sorted(attrs.items())))


def _digest(full: bytes, size: int) -> str:
    """Of the bytes with their places, so that a hole and zeros are the same content."""
    digest, at = hashlib.sha256(), 0
    fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole up to the end
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            while start < at:
                data = os.pread(fd, min(1 << 20, at - start), start)
                if data.strip(b"\0"):
                    digest.update(start.to_bytes(8, "little") + data)
                start += len(data)
    finally:
        os.close(fd)
    return digest.hexdigest()


def differences(before: dict[bytes, Row], after: dict[bytes, Row]) -> list[str]:
    return [
        f"{path!r}: {before.get(path)} became {after.get(path)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
