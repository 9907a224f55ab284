"""Weight updates against a real owner: a reader gets v whole, v+1 whole, or a refusal, wherever the writer dies."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from belayer.errors import BelayerError, Fenced, Refused, WeightsBroken, WeightsTorn
from belayer.messages import owner as o
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.tensors import Sparse
from gpuowner.update import POINTS, begin_update
from tests.support import versions as v
from tests.support.owner_stack import Stack
from tests.support.wait import eventually

MODELS = {"swap": "swapped", "in_place": "placed"}
MANY = 2000  # tensors: a layout that no packet holds


class Host:
    """One weights owner with the same model twice, one for each mode."""

    def __init__(self) -> None:
        self.stack = Stack()
        self.folder = v.make_model(Path(tempfile.mkdtemp(prefix="blw-m-", dir="/tmp")) / "model")
        rows = [
            f'[[model]]\nname = "{name}"\npath = "{self.folder}"\nupdate = "{mode}"\n' for mode, name in MODELS.items()
        ]
        many = self.folder.parent / "many"
        many.mkdir()
        (many / "config.json").write_text("{}")
        v.save(many / "model.safetensors", {f"w.{n}": np.full(4, n, dtype=np.float32) for n in range(MANY)})
        rows.append(f'[[model]]\nname = "many"\npath = "{many}"\n')
        slot = '[[slot]]\nname = "slot0"\nmodel = "swapped"\n'
        self.stack.paths.config.write_text("".join(rows) + slot)
        self.path = self.stack.paths.owner_sock("weights")
        self.daemon = self.stack.daemon("gpuowner", "--kind", "weights")
        self.stack.wait_socket(self.daemon, self.path)

    def client(self, role: o.Role = o.Role.WORKER) -> OwnerClient:
        return OwnerClient(self.path, role, "test", timeout=300.0)

    def view(self, mode: str) -> WeightsView:
        return WeightsView(self.client(), MODELS[mode])

    def info(self, mode: str) -> o.WeightsInfo:
        client = self.client(o.Role.ADMIN)
        status, _ = client.call(o.OwnerStatus(), o.OwnerStatusReply)
        client.close()
        return next(row for row in status.weights if row.model == MODELS[mode])

    def settled(self, mode: str) -> o.WeightsInfo:
        """Once the owner has noticed the writer's end."""
        return eventually(lambda: (now := self.info(mode)).state in ("sealed", "torn") and now, what="the update ends")

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


def whole(version: int) -> dict[str, set[int]]:
    return {name: {version} for name in v.SHAPES}


def seen(host: Host, mode: str) -> tuple[int, dict[str, set[int]]] | None:
    """What a new reader gets: (version of the grant, versions in its verified bytes); None: it is refused."""
    try:
        view = host.view(mode)
    except WeightsTorn:
        return None
    view.verify()
    got = view.grant.version, v.versions_in(view)
    view.mapping.close()
    return got


def dead_at(mode: str, kind: str) -> list[tuple[str, str, str]]:
    """The points that this kind of update passes."""
    passes = set(POINTS) - ({"torn"} if kind == "sparse" else set())
    if mode == "in_place" or kind == "whole":
        passes -= {"rest_copied"}  # there is no other memory, or nothing left, to copy
    return [(mode, kind, point) for point in POINTS if point in passes]


@pytest.mark.parametrize(
    ("mode", "kind", "point"),
    [case for mode in MODELS for kind in ("whole", "delta", "sparse") for case in dead_at(mode, kind)],
)
def test_a_writer_killed_anywhere_leaves_one_version_whole_or_a_refusal(
    host: Host, mode: str, kind: str, point: str
) -> None:
    if host.info(mode).state == "torn" or v.versions_in(host.view(mode)) != whole(host.info(mode).version):
        host.write(mode, "whole")  # every case begins on one version throughout
    last = host.info(mode).version
    reader = host.view(mode)
    writer = v.Writer(host.path, MODELS[mode], mode, kind, last + 1, point)
    writer.stopped(point)
    assert_unmixed(host, mode, kind, last, reader)
    writer.kill()
    after = host.settled(mode)
    if mode == "in_place" and after.state == "torn":
        assert point != "committed"
        assert seen(host, mode) is None
        with pytest.raises(WeightsTorn):
            reader.verify_version()
        assert_only_a_rewrite_publishes(host, mode)
        return
    assert after.state == "sealed"
    assert after.version == last + 1 if point == "committed" else after.version in (last, last + 1)
    assert point in ("commit_sent", "committed") or after.version == last
    assert seen(host, mode) == (after.version, expected(kind, last, after.version))
    if mode == "swap":
        reader.verify()
        assert v.versions_in(reader) == whole(last), "a reader that stays keeps its version"
    reader.mapping.close()


def expected(kind: str, last: int, now: int) -> dict[str, set[int]]:
    if now == last or kind == "whole":
        return whole(now)
    changed = v.DELTA if kind == "delta" else v.DELTA[:1]
    return {name: {now if name in changed else last} for name in v.SHAPES}


def assert_unmixed(host: Host, mode: str, kind: str, last: int, reader: WeightsView) -> None:
    """While the writer stands still: new readers get a whole version or none."""
    got = seen(host, mode)
    assert got in (None, (last, whole(last)), (last + 1, expected(kind, last, last + 1)))
    if mode == "swap":
        assert got is not None, "the last version stays readable during a swap"
        assert v.versions_in(reader) == whole(last)


def assert_only_a_rewrite_publishes(host: Host, mode: str) -> None:
    client = host.client(o.Role.LOADER)
    with pytest.raises(WeightsTorn):
        begin_update(client, MODELS[mode], mode=mode)
    client.close()
    version = host.write(mode, "whole")
    assert seen(host, mode) == (version, whole(version))


def test_readers_that_stay_see_what_their_mode_promises(host: Host) -> None:
    for mode in MODELS:
        host.write(mode, "whole")
        view = host.view(mode)
        last, address, held = view.grant.version, view.mapping.address, v.held(view, "model.norm.weight")
        version = host.write(mode, "whole")
        if mode == "swap":
            assert np.floor(held[0]) == last
            assert not view.verify_version()
            assert view.grant.version == last
            assert view.follow()
        else:
            assert view.verify_version()
            assert not view.follow()
        assert (view.grant.version, view.mapping.address) == (version, address)
        assert np.floor(held[0]) == version, "the same address shows the new version"
        assert v.versions_in(view) == whole(version)
        view.mapping.close()


def test_one_writer_the_next_version_and_names_that_fit(host: Host) -> None:
    host.write("swap", "whole")
    client, other = host.client(o.Role.LOADER), host.client(o.Role.LOADER)
    last = host.info("swap").version
    with pytest.raises(Fenced):
        begin_update(client, MODELS["swap"], version=last + 5)
    with pytest.raises(WeightsBroken, match="no model named"):
        begin_update(client, "nothing")
    with pytest.raises(Refused, match="role"):
        begin_update(host.client(), MODELS["swap"])
    with pytest.raises(Refused), begin_update(client, MODELS["swap"], mode="in_place"):
        pass
    update = begin_update(client, MODELS["swap"], whole=True)
    with pytest.raises(BelayerError):
        begin_update(other, MODELS["swap"])
    norm = v.tensor("model.norm.weight", 9)
    for tensors, named in (
        ({"no.such.weight": norm}, "no tensor named no.such.weight"),
        ({"model.norm.weight": norm[:5]}, "has shape"),
        ({"model.norm.weight": norm.astype(np.float64)}, "not without loss"),
        ({"model.norm.weight": "text"}, "not a tensor"),
    ):
        with pytest.raises(WeightsBroken, match=named):
            update.write(tensors)
    with pytest.raises(Refused, match="were not written"):
        update.commit()
    with pytest.raises(Refused, match="whole tensors"):
        update.write_sparse({"model.norm.weight": Sparse([0], norm[:1])})
    assert update.abort().state == "sealed"
    assert seen(host, "swap") == (last, whole(last))
    embed = "model.embed_tokens.weight"
    twice = begin_update(client, MODELS["swap"])
    with pytest.raises(WeightsBroken, match=r"lm_head\.weight and model\.embed_tokens\.weight are one tensor"):
        twice.write({embed: v.tensor(embed, last + 1), "lm_head.weight": v.tensor(embed, last + 2)})
    twice.write({embed: v.tensor(embed, last + 1), "lm_head.weight": v.tensor(embed, last + 1)})
    last = twice.commit().version
    assert seen(host, "swap") == (last, {name: {last if name == embed else last - 1} for name in v.SHAPES})
    delta = begin_update(client, MODELS["swap"])
    with pytest.raises(WeightsBroken, match="do not fit"):
        delta.write_sparse({"model.norm.weight": Sparse([64], norm[:1])})
    delta.abort()


def mistaken(host: Host, first: dict[str, object]) -> None:
    """A trainer that writes ``first`` and then something that is no tensor."""
    with begin_update(host.client(o.Role.LOADER), MODELS["in_place"]) as update:
        update.write(first)
        update.write({"model.norm.weight": "the trainer's mistake"})


def test_an_exception_in_the_writer_aborts(host: Host) -> None:
    host.write("in_place", "whole")
    last = host.info("in_place").version
    with pytest.raises(WeightsBroken, match="not a tensor"):
        mistaken(host, {})
    assert seen(host, "in_place") == (last, whole(last)), "nothing was touched, and the hash agrees"
    with pytest.raises(WeightsBroken, match="not a tensor"):
        mistaken(host, v.state(99, v.DELTA))
    assert seen(host, "in_place") is None
    host.write("in_place", "whole")


def test_a_delta_carries_the_digests_of_untouched_chunks(host: Host, tmp_path: Path) -> None:
    host.write("swap", "whole")
    before = host.view("swap").grant.chunk_digests
    assert len(before) == 2
    version = host.write("swap", "delta")  # all of it lies in the last chunk
    view = host.view("swap")
    view.verify()
    after = view.grant.chunk_digests
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert v.versions_in(view) == expected("delta", version - 1, version)
    np.testing.assert_array_equal(
        v.held(view, f"{v.LAYER}.self_attn.qkv_proj.weight")[6:8], v.tensor(v.DELTA[0], version)
    )
    folder = v.make_model(tmp_path / "next", version + 1)
    with begin_update(host.client(o.Role.LOADER), MODELS["swap"], whole=True) as update:
        update.write_folder(folder)
        info = update.commit()
    assert seen(host, "swap") == (info.version, whole(version + 1))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with (
        pytest.raises(WeightsBroken, match=r"model\.safetensors"),
        begin_update(host.client(o.Role.LOADER), MODELS["swap"], whole=True) as update,
    ):
        update.write_folder(folder)
    assert seen(host, "swap") == (info.version, whole(info.version))


def test_a_layout_too_large_for_a_packet_rides_beside_it(host: Host) -> None:
    view = WeightsView(host.client(), "many")
    assert view.grant.layout == ()
    assert len(view.tensors) == MANY
    with begin_update(host.client(o.Role.LOADER), "many") as update:
        update.write({"w.7": np.full(4, -1, dtype=np.float32)})
        update.commit()
    assert view.follow()
    assert [v.held(view, f"w.{n}").tolist() for n in (6, 7, 8)] == [[6.0] * 4, [-1.0] * 4, [8.0] * 4]
    view.mapping.close()
