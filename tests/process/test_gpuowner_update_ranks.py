"""Updates of a model that lies in two parts, against a real owner: wherever the writer dies, both parts are of one
version or both are refused.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from belayer.errors import Refused, WeightsBroken, WeightsTorn
from belayer.messages import owner as o
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.tensors import Sparse
from gpuowner.update import begin_update, points
from tests.support import rank_versions as v
from tests.support.owner_stack import Stack
from tests.support.versions import Writer
from tests.support.wait import eventually

MODELS = {"swap": "swapped", "in_place": "placed"}
WRITER = "tests.support.rank_versions"


class Host:
    """One weights owner with the same model twice, one for each mode, each in two parts."""

    def __init__(self) -> None:
        self.stack = Stack()
        folder = Path(tempfile.mkdtemp(prefix="blw-m-", dir="/tmp")) / "model"
        self.folder = v.make_model(folder, self.stack.paths.state / "recipes")
        rows = [
            f'[[model]]\nname = "{name}"\npath = "{folder}"\ndtype = "{v.DTYPE}"\nupdate = "{mode}"\n'
            f'[[slot]]\nname = "slot-{mode}"\nmodel = "{name}"\ntensor_parallel = {v.RANKS}\n'
            for mode, name in MODELS.items()
        ]
        self.stack.paths.config.write_text("".join(rows))
        self.path = self.stack.paths.owner_sock("weights")
        self.daemon = self.stack.daemon("gpuowner", "--kind", "weights")
        self.stack.wait_socket(self.daemon, self.path)

    def client(self, role: o.Role = o.Role.WORKER) -> OwnerClient:
        return OwnerClient(self.path, role, "test", timeout=300.0)

    def view(self, mode: str, rank: int) -> WeightsView:
        return WeightsView(self.client(), MODELS[mode], rank)

    def infos(self, mode: str) -> list[o.WeightsInfo]:
        client = self.client(o.Role.ADMIN)
        status, _ = client.call(o.OwnerStatus(), o.OwnerStatusReply)
        client.close()
        rows = [row for row in status.weights if row.model == MODELS[mode]]
        assert [row.rank for row in rows] == list(range(v.RANKS))
        assert len({(row.state, row.version, row.writer) for row in rows}) == 1, "the parts have come apart"
        return rows

    def info(self, mode: str) -> o.WeightsInfo:
        return self.infos(mode)[0]

    def settled(self, mode: str) -> o.WeightsInfo:
        """Once the owner has noticed the writer's end."""
        eventually(lambda: self.info(mode).state in ("sealed", "torn"), what="the update ends")
        return self.info(mode)

    def write(self, mode: str, kind: str) -> int:
        """Make the next version and return its number."""
        version = self.info(mode).version + 1
        client = self.client(o.Role.LOADER)
        v.write(client, MODELS[mode], mode, kind, version, lambda point: None)
        client.close()
        return version


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.stack.stop()
    shutil.rmtree(made.folder.parent)


def after(kind: str, last: int, now: int) -> dict[str, int]:
    """The version that each tensor is of when ``now`` was made over ``last`` by an update of this kind."""
    changed = {"whole": tuple(v.SHAPES), "delta": v.DELTA, "sparse": v.DELTA[:1]}[kind]
    return {name: now if name in changed else last for name in v.SHAPES}


def seen(host: Host, mode: str, rank: int, kind: str, last: int) -> int:
    """The version that a new reader of this part gets, its bytes proven to be of it; 0: it is refused."""
    try:
        view = host.view(mode, rank)
    except WeightsTorn:
        return 0
    view.verify()
    got = view.grant.version
    assert got in (last, last + 1)
    assert v.is_of(view, rank, after(kind, last, got)), f"rank {rank} at v{got}"
    view.mapping.close()
    return got


def together(host: Host, mode: str, kind: str, last: int) -> int:
    """What new readers of both parts get, at one moment: the commit may come between two of their questions."""
    while True:
        one, other, again = (seen(host, mode, rank, kind, last) for rank in (0, 1, 0))
        if one == again:
            assert one == other, "parts of different versions are served"
            return one


def cases() -> list[tuple[str, str, str]]:
    """Each point that each kind of update passes."""
    rows = []
    for mode, kind in (("swap", "whole"), ("swap", "delta"), ("in_place", "whole"), ("in_place", "sparse")):
        skipped = {"torn"} if kind == "sparse" else set()
        if mode == "in_place" or kind == "whole":
            skipped.add("rest_copied")  # there is no other memory to copy from
        rows += [(mode, kind, point) for point in points(v.RANKS) if point.partition(".")[0] not in skipped]
    return rows


@pytest.mark.parametrize(("mode", "kind", "point"), cases())
def test_a_writer_killed_anywhere_leaves_all_parts_at_one_version_or_refused(
    host: Host, mode: str, kind: str, point: str
) -> None:
    last = host.write(mode, "whole")  # every case begins on one version throughout
    readers = [host.view(mode, rank) for rank in range(v.RANKS)]
    writer = Writer(host.path, MODELS[mode], mode, kind, last + 1, point, WRITER)
    writer.stopped(point)
    during = together(host, mode, kind, last)
    assert during in ({last} if mode == "swap" else {0, last}) or point in ("commit_sent", "committed")
    writer.kill()
    ended = host.settled(mode)
    if mode == "in_place" and ended.state == "torn":
        assert point != "committed"
        assert together(host, mode, kind, last) == 0
        for reader in readers:
            with pytest.raises(WeightsTorn):
                reader.verify_version()
        assert_only_a_rewrite_publishes(host, mode)
        return
    assert ended.state == "sealed"
    assert ended.version == last + 1 if point == "committed" else ended.version in (last, last + 1)
    assert point in ("commit_sent", "committed") or ended.version == last
    assert together(host, mode, kind, last) == ended.version
    for rank, reader in enumerate(readers):
        if mode == "swap":
            reader.verify()
            assert v.is_of(reader, rank, after("whole", last, last)), "a reader that stays keeps its version"
        assert reader.follow() is (mode == "swap" and ended.version > last)
        assert v.is_of(reader, rank, after(kind, last, ended.version))
        reader.mapping.close()


def assert_only_a_rewrite_publishes(host: Host, mode: str) -> None:
    client = host.client(o.Role.LOADER)
    with pytest.raises(WeightsTorn):
        begin_update(client, MODELS[mode], mode=mode)
    client.close()
    version = host.write(mode, "whole")
    assert together(host, mode, "whole", version - 1) == version


def test_tensors_are_checked_for_all_parts_before_a_byte_is_written(host: Host) -> None:
    last = host.write("in_place", "whole")
    update = begin_update(host.client(o.Role.LOADER), MODELS["in_place"], mode="in_place")
    for tensors, named in (
        ({"no.such.weight": v.tensor(v.NORM, 9)}, "no tensor named no.such.weight"),
        ({v.O: v.tensor(v.O, 9)[:, :32]}, "has shape"),
        ({v.Q: v.tensor(v.Q, 9).astype(np.float64)}, "not without loss"),
    ):
        with pytest.raises(WeightsBroken, match=named):
            update.write(tensors)
    with pytest.raises(WeightsBroken, match="do not fit"):
        update.write_sparse({v.K: Sparse([4 * 64], v.tensor(v.K, 9).reshape(-1)[:1])})
    assert update.abort().state == "sealed", "nothing was touched, and the hash of both parts agrees"
    assert together(host, "in_place", "whole", last) == last


def test_a_folder_fills_both_parts_and_a_missing_tensor_keeps_the_update_open(host: Host, tmp_path: Path) -> None:
    last = host.write("swap", "whole")
    update = begin_update(host.client(o.Role.LOADER), MODELS["swap"], whole=True)
    update.write(v.state(last + 1, v.DELTA))
    with pytest.raises(Refused, match="3 tensors were not written"):
        update.commit()
    update.write_folder(v.make_model(tmp_path / "next", tmp_path / "kept", last + 1))
    assert update.commit().version == last + 1
    assert together(host, "swap", "whole", last) == last + 1


def test_an_owner_killed_inside_an_update_comes_back_with_both_parts_at_the_last_version(host: Host) -> None:
    last = host.write("swap", "whole")
    update = begin_update(host.client(o.Role.LOADER), MODELS["swap"], whole=True)
    update.write(v.state(last + 1))
    host.daemon.kill()
    host.daemon.wait()
    host.daemon = host.stack.daemon("gpuowner", "--kind", "weights")
    host.stack.wait_socket(host.daemon, host.path)
    assert (host.info("swap").state, host.info("swap").version) == ("sealed", last)
    assert together(host, "swap", "whole", last) == last
    assert host.write("swap", "whole") == last + 1
    assert together(host, "swap", "whole", last) == last + 1
