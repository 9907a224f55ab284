"""One Belayer host per Ray node, and a look at the fleet: ``python -m examples.ray_fleet --model DIR``.

Ray places one actor on each node; the actor starts the daemons there and keeps them. The driver passes public keys
around, never secrets, and reads each host's own status. Belayer schedules nothing: Ray decides which nodes there are,
and the trainer which URL it asks.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from examples.ray_fleet.node import Node


def main() -> int:
    parser = argparse.ArgumentParser(prog="examples.ray_fleet", description="One Belayer host per Ray node.")
    parser.add_argument("--model", required=True, type=Path, help="model directory, at this path on every node")
    parser.add_argument("--root", default=Path("/var/tmp/belayer-ray"), type=Path, help="below it, a root per node")
    parser.add_argument("--port", default=7300, type=int, help="fleet port of the first node; one more for each")
    parser.add_argument("--slots", default=1, type=int)
    parser.add_argument("--hold", action="store_true", help="keep the hosts until Enter is pressed")
    chosen = parser.parse_args()
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        print("ray_fleet: ray is not installed; pip install ray", file=sys.stderr)
        return 2
    ray.init()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return drive(ray, alive, chosen)


def drive(ray: Any, nodes: list[dict[str, Any]], chosen: argparse.Namespace) -> int:
    """Exit 0 when every host sees every other one up."""
    actors, where = {}, {}
    for index, node in enumerate(nodes):
        name = f"node{index}"
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        remote = ray.remote(num_cpus=0, scheduling_strategy=place)(Node)
        where[name] = f"{node['NodeManagerAddress']}:{chosen.port + index}"
        actors[name] = remote.remote(name, where[name], chosen.root / name, chosen.model, chosen.slots)
    keys = {name: ray.get(actor.key.remote()) for name, actor in actors.items()}
    ray.get([actor.start.remote(keys, where) for actor in actors.values()])
    good = True
    for name, said in ((name, ray.get(actor.fleet.remote())) for name, actor in actors.items()):
        peers = ", ".join(f"{peer['host']} {peer['state']}" for peer in said["peers"]) or "no peers"
        print(f"{name} {said['url']}: {peers}")
        good = good and all(peer["state"] == "up" for peer in said["peers"])
    if chosen.hold:
        input("hosts run; Enter ends them ")
    ray.get([actor.stop.remote() for actor in actors.values()])
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
