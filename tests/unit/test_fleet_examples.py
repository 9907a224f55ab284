"""What examples/kubernetes would start: its manifest is read, and the script of its init container really run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from belayer import config, fleet_keys
from tests.support.router_host import MODEL, TREE

MANIFEST = TREE / "examples/kubernetes/fleet.yaml"


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return {row["kind"]: row for row in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture
def short() -> Iterator[Path]:
    """A root must be short enough for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        yield Path(folder)


def test_every_mount_has_a_volume_and_every_volume_a_source(parts: dict[str, Any]) -> None:
    pod = parts["DaemonSet"]["spec"]["template"]
    labels = parts["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    volumes = {row["name"]: row for row in pod["spec"]["volumes"]}
    mounts = {
        row["name"] for one in ("initContainers", "containers") for c in pod["spec"][one] for row in c["volumeMounts"]
    }
    assert mounts == set(volumes)
    assert volumes["config"]["configMap"]["name"] == parts["ConfigMap"]["metadata"]["name"]
    assert volumes["keys"]["secret"]["secretName"] == parts["Secret"]["metadata"]["name"]


def test_init_container_writes_a_configuration_that_is_good(parts: dict[str, Any], short: Path) -> None:
    fleet, keys, root = short / "fleet", short / "keys", short / "root"
    fleet.mkdir()
    root.mkdir()
    data = parts["ConfigMap"]["data"]
    (fleet / "head.toml").write_text(data["head.toml"].replace("/models/model", str(MODEL)))
    (fleet / "peers").write_text(data["peers"])
    for node in ("node-a", "node-b"):
        fleet_keys.make(keys, node)
    init = parts["DaemonSet"]["spec"]["template"]["spec"]["initContainers"][0]
    script = init["args"][0].replace("belayerctl", f"{sys.executable} -m belayerctl")
    for said, real in (
        (" /keys/", f" {keys}/"),
        ('"/keys/', f'"{keys}/'),
        ("/etc/belayer-fleet", fleet),
        ("/belayer/", f"{root}/"),
        ("=/belayer ", f"={root} "),
    ):
        script = script.replace(said, str(real))
    env = {**os.environ, "NODE": "node-a"}
    done = subprocess.run([*init["command"], script], env=env, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = config.load(root / "belayer.toml")
    assert (found.host.name, found.fleet.listen) == ("node-a", "10.0.0.1:7300")
    assert [(peer.name, peer.address) for peer in found.peer] == [("node-b", "10.0.0.2:7300")]
    assert sorted(path.name for path in (root / "keys").iterdir()) == ["node-a.key", "node-a.key_secret", "node-b.key"]
