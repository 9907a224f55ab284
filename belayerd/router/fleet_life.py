"""Which life of this host's router speaks, and with which key: known before anything slow is done."""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer import clock, fleet_keys, statefile
from belayer.config import Config
from belayer.messages.fleet import Life


class LifeNumber(msgspec.Struct):
    number: int


def next_life(path: Path, instance: str) -> Life:
    """Larger than that of every earlier life of this host, also when its state was lost: it follows the clock too."""
    last: LifeNumber | None = statefile.load(path, LifeNumber)
    number = max(int(clock.wall()), (last.number if last else 0) + 1)
    statefile.save(path, LifeNumber(number))
    return Life(number=number, nonce=instance)


def keys_of(config: Config) -> fleet_keys.Pair | None:
    """This host's pair, once it is sure that every peer's key is there too; None without a fleet. Raises
    ConfigInvalid."""
    if not config.fleet.listen:
        return None
    return fleet_keys.of_fleet(Path(config.fleet.keys), config.host.name, [peer.name for peer in config.peer])
