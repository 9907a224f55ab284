"""Keys of hosts, numbers of their lives, addresses of peers: what a fleet has on disk and in its configuration."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from belayer import config, fleet_keys
from belayer.errors import BelayerError, ConfigInvalid, HostUnfit
from belayerd.router.fleet_life import next_life


def test_keys(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(mode=0o700)
    os.chown(a, 12345, 12345)
    key = fleet_keys.make(a, "host-a")
    assert (a / "host-a.key_secret").stat().st_uid == 12345, "the user of the router, who owns the folder, reads it"
    other = fleet_keys.make(b, "host-b")
    assert stat.S_IMODE((a / "host-a.key_secret").stat().st_mode) == 0o600
    fleet_keys.add(b, "host-a", key)
    assert fleet_keys.admitted(b) == {key: "host-a", other: "host-b"}
    wrong: list[tuple[type[BelayerError], tuple[str, str]]] = [
        (ConfigInvalid, ("host-c", "no key")),
        (ConfigInvalid, ("host-c", key)),
        (ConfigInvalid, ("host-b", key)),
        (ConfigInvalid, ("../x", key)),
    ]
    for kind, (name, said) in wrong:
        with pytest.raises(kind):
            fleet_keys.add(b, name, said)
    with pytest.raises(HostUnfit):
        fleet_keys.make(a, "host-a")
    fleet_keys.remove(b, "host-a")
    assert fleet_keys.admitted(b) == {other: "host-b"}
    (a / "host-a.key_secret").chmod(0o640)
    with pytest.raises(ConfigInvalid, match="other users"):
        fleet_keys.load(a, "host-a")


def test_lives_grow(tmp_path: Path) -> None:
    lives = [next_life(tmp_path / "life", str(n)).number for n in range(3)]
    assert lives == sorted(set(lives))


# -- configuration --------------------------------------------------------------------------------------------


def fleet_config(folder: Path, listen: str, *addresses: str) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    peers = "".join(f'[[peer]]\nname = "p{n}"\naddress = "{one}"\n' for n, one in enumerate(addresses))
    path = folder / "belayer.toml"
    path.write_text(
        f'[host]\nname = "host-a"\n[[model]]\nname = "m"\npath = "m"\n[[slot]]\nname = "s0"\nmodel = "m"\n'
        f'[router]\nport = 8000\n[fleet]\nlisten = "{listen}"\n{peers}'
    )
    return path


@pytest.mark.parametrize(
    ("listen", "addresses", "said"),
    [
        ("10.0.0.1:7300", ["tcp://10.0.0.2:7300"], "peer[0].address: 'tcp://10.0.0.2:7300' is not ADDRESS:PORT"),
        ("10.0.0.1:7300", ["10.0.0.2 :7300"], "peer[0].address: '10.0.0.2 :7300' is not ADDRESS:PORT"),
        ("10.0.0.1:7300", [" b:7300"], "peer[0].address: ' b:7300' is not ADDRESS:PORT"),
        ("10.0.0.1:7300", ["b:99999"], "peer[0].address: 'b:99999' is not ADDRESS:PORT"),
        ("10.0.0.1:7300", ["10.0.0.1:7300"], "peer[0].address: '10.0.0.1:7300' is where this host itself listens"),
        ("10.0.0.1:7300", ["b:1", "b:1"], "peer[1].address: 'b:1' is used twice"),
        ("tcp://10.0.0.1:7300", [], "fleet.listen: 'tcp://10.0.0.1:7300' is not ADDRESS:PORT"),
        ("127.0.0.1:8000", [], "fleet.listen: '127.0.0.1:8000' is the port of the router's clients"),
        ("0.0.0.0:8000", [], "fleet.listen: '0.0.0.0:8000' is the port of the router's clients"),
    ],
)
def test_addresses_that_cannot_be_are_refused_by_name(
    tmp_path: Path, listen: str, addresses: list[str], said: str
) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        config.load(fleet_config(tmp_path, listen, *addresses))
    assert said in str(refused.value)


def test_addresses_that_can_be(tmp_path: Path) -> None:
    loaded = config.load(fleet_config(tmp_path, "10.0.0.1:8000", "host-b.example:7300", "[fd00::2]:7300", "10.0.0.3:1"))
    assert len(loaded.peer) == 3
