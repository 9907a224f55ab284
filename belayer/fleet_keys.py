"""The CURVE keys of a host: its own pair and the public keys of its peers, in one folder, in zmq.auth's file format.

``NAME.key`` holds a public key and ``NAME.key_secret`` a pair; NAME is the name of the host that the key speaks for.
A host holds the secret of one name: its own.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.auth

from belayer.errors import ConfigInvalid, HostUnfit
from belayer.ids import is_name

PUBLIC, SECRET = ".key", ".key_secret"
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class Pair(msgspec.Struct, frozen=True):
    public: bytes  # Z85, 40 characters
    secret: bytes


def make(folder: Path, name: str) -> str:
    """Make the pair of host ``name``; files are 0600 in a 0700 folder. Returns the public key. Raises HostUnfit when
    there is one already: peers know it, so it is not replaced."""
    _check_name(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = folder / f"{name}{SECRET}"
    if secret.exists():
        raise HostUnfit(f"{secret} exists", kept="the pair as it is", remedy="move it away to make another")
    old = os.umask(0o177)
    try:
        zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(old)
    _give(folder, secret, folder / f"{name}{PUBLIC}")
    return load(folder, name).public.decode()


def add(folder: Path, name: str, key: str) -> Path:
    """Admit host ``name`` by its public key. Raises ConfigInvalid for what is no key, or is another host's."""
    _check_name(name)
    if not _Z85.fullmatch(key):
        raise ConfigInvalid(f"{key!r} is no public key (40 characters of Z85)", remedy="belayerctl keys show prints it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / f"{name}{SECRET}").exists():
        raise ConfigInvalid(f"{name} is this host itself", remedy="name the peer")
    owner = admitted(folder).get(key)
    if owner not in (None, name):
        raise ConfigInvalid(f"that is the key of {owner}", remedy="each host needs a key of its own")
    path = folder / f"{name}{PUBLIC}"
    beside = folder / f".{name}.tmp"
    beside.write_text(f'curve\n    public-key = "{key}"\n')
    beside.chmod(0o600)
    _give(folder, beside)
    beside.replace(path)
    return path


def remove(folder: Path, name: str) -> None:
    """Admit host ``name`` no more. Raises ConfigInvalid when there is no such key."""
    path = folder / f"{name}{PUBLIC}"
    if not path.exists() or (folder / f"{name}{SECRET}").exists():
        raise ConfigInvalid(f"no peer {name} in {folder}")
    path.unlink()


def load(folder: Path, name: str) -> Pair:
    """The pair of host ``name``. Raises ConfigInvalid when it is absent, unreadable, or open to other users."""
    path = folder / f"{name}{SECRET}"
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        public, secret = zmq.auth.load_certificate(path)
    except OSError as why:
        raise ConfigInvalid(f"no key of {name} in {folder}", remedy="belayerctl keys make") from why
    except ValueError as why:
        raise ConfigInvalid(f"{path} is no key: {why}", remedy="belayerctl keys make, in another folder") from why
    if mode & 0o077:
        raise ConfigInvalid(f"{path} can be read by other users (mode {mode:o})", remedy=f"chmod 600 {path}")
    if secret is None or zmq.curve_public(secret) != public:
        raise ConfigInvalid(f"{path} holds no pair that belongs together", remedy="belayerctl keys make")
    return Pair(public, secret)


def of_fleet(folder: Path, name: str, peers: Iterable[str]) -> Pair:
    """The pair of host ``name``, once it is sure that every peer's key is there too. Raises ConfigInvalid."""
    for peer in peers:
        key_of(folder, peer)
    return load(folder, name)


def admitted(folder: Path) -> dict[str, str]:
    """Public key -> host, of all that are listed, this host too. A file that is no key, or a key with two names, is
    ConfigInvalid: who it would speak for is not known."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob(f"*{PUBLIC}")):
        try:
            key = zmq.auth.load_certificate(path)[0].decode()
        except (OSError, ValueError) as why:
            raise ConfigInvalid(f"{path} is no key: {why}", remedy="belayerctl keys add") from why
        if key in found:
            raise ConfigInvalid(f"{path} holds the key of {found[key]}", remedy="each host needs a key of its own")
        found[key] = path.name.removesuffix(PUBLIC)
    return found


def key_of(folder: Path, name: str) -> bytes:
    """The public key of a peer, in Z85. Raises ConfigInvalid when it is not listed."""
    for key, host in admitted(folder).items():
        if host == name:
            return key.encode()
    raise ConfigInvalid(f"no key of {name} in {folder}", remedy=f"belayerctl keys add {name} KEY")


def _give(folder: Path, *paths: Path) -> None:
    """Root makes keys, the router's user reads them: they belong to whom the folder belongs."""
    owner = folder.stat()
    for path in paths:
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ConfigInvalid(f"{name!r} is no name (1-48 of a-z 0-9 _ . -)")
