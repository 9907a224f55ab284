"""What sealed weights promise whatever memory they lie in: over memfd, over cuda_vmm on the fake driver, and over
cuda_vmm on the real driver where there is one. The owner is the daemon, its holder a real one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from belayer.errors import HostUnfit, Refused, WeightsBroken, WeightsTorn
from belayer.messages import owner as o
from gpuowner.attach import WeightsView
from gpuowner.attach_gpu_weights import GpuWeightsView
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.backends.fake_vmm import used_bytes
from gpuowner.backends.port import Access
from gpuowner.digest import root_digest
from gpuowner.update import POINTS, begin_update
from tests.contract.test_memory_backend import no_gpu
from tests.support import memory as support
from tests.support import versions as v
from tests.support.device_owners import MEMFD, MODELS, SHAPES, DeviceOwners, seen_in, state, tensor
from tests.support.owners import kill_pid
from tests.support.wait import eventually

NAME = f"weights{os.getpid()}"
ROOM, GRAIN = 96 << 20, 2 << 20
FAKE = f"fake:{NAME}:{ROOM}"


@pytest.fixture(scope="module", params=["memfd", "cuda_vmm_over_fake", "cuda_vmm_over_cuda"])
def memory(request: pytest.FixtureRequest) -> str:
    which = str(request.param)
    if which == "cuda_vmm_over_cuda":
        reason = no_gpu()
        if reason:
            pytest.skip(f"no GPU here: {reason}")
        return "cuda"
    return FAKE if which.endswith("fake") else MEMFD


@pytest.fixture(scope="module")
def host(memory: str) -> Iterator[DeviceOwners]:
    made = DeviceOwners(memory)
    made.up("weights")
    yield made
    made.stop()


def whole(version: int) -> dict[str, set[int]]:
    return {name: {version} for name in SHAPES}


def changed(kind: str, version: int) -> dict[str, set[int]]:
    """What an update of this kind writes."""
    names = {"whole": tuple(SHAPES), "delta": v.DELTA, "sparse": v.DELTA[:1]}[kind]
    return {name: {version} for name in names}


def test_a_model_is_loaded_as_its_files_say_and_accounted(host: DeviceOwners) -> None:
    status = host.status("weights")
    assert status.backend == ("memfd" if host.cuda is None else "cuda_vmm")
    for mode in MODELS:
        reader, info = host.reader(mode), host.info(mode)
        for name in SHAPES:
            assert np.array_equal(reader.value(name), tensor(name, info.version).reshape(-1)), name
        grant = reader.grant
        assert (info.state, info.digest) == ("sealed", grant.digest)
        assert root_digest(grant.chunk_digests, grant.nbytes) == grant.digest
        assert len(grant.chunk_digests) == 1, "a digest for each 64 MiB"
        assert info.resident >= sum(spec.nbytes for spec in reader.tensors.values() if not spec.alias_of)
        assert ("reader", os.getpid()) in [(row.who, row.pid) for row in info.readers]
        reader.close()


def test_a_swap_leaves_the_last_version_to_its_readers_until_they_follow(host: DeviceOwners) -> None:
    last = host.write("swap", "whole")
    reader = host.reader("swap")
    address = reader.address()
    for kind in ("delta", "sparse"):
        before, version = seen_in(reader), host.write("swap", kind)
        assert version == last + 1
        reader.check()
        assert seen_in(reader) == before, "a reader that stays keeps its version"
        assert host.info("swap").staging == 0
        assert reader.follow(), "other memory"
        assert (reader.address(), reader.grant.version) == (address, version)
        assert seen_in(reader) == before | changed(kind, version)
        last = version
    assert not reader.follow(), "it is the last one already"
    reader.close()


def test_an_update_in_place_is_seen_below_the_mapping(host: DeviceOwners) -> None:
    host.write("in_place", "whole")
    reader = host.reader("in_place")
    for kind in ("whole", "delta", "sparse"):
        before, version = seen_in(reader), host.write("in_place", kind)
        with pytest.raises(WeightsBroken):
            reader.check()  # by the digests that it was attached with
        assert not reader.follow(), "the same memory"
        reader.check()
        assert reader.grant.version == version
        assert seen_in(reader) == before | changed(kind, version)
    reader.close()


def test_an_update_that_is_given_up_leaves_the_last_version_or_torn(host: DeviceOwners) -> None:
    for mode in MODELS:
        last = host.write(mode, "whole")
        client = host.client("weights", o.Role.LOADER)
        update = begin_update(client, MODELS[mode], mode=mode, driver=host.memory)
        assert update.abort().state == "sealed", "nothing was touched"
        update = begin_update(client, MODELS[mode], mode=mode, driver=host.memory)
        update.write(state(last + 1, v.DELTA))
        assert update.abort().state == ("sealed" if mode == "swap" else "torn")
    with pytest.raises(WeightsTorn):
        host.reader("in_place")
    with pytest.raises(WeightsTorn):
        host.write("in_place", "delta")  # a part cannot make them whole
    version = host.write("in_place", "whole")
    reader = host.reader("in_place")
    assert seen_in(reader) == whole(version)
    reader.close()


def test_a_commit_that_says_other_bytes_is_refused(host: DeviceOwners) -> None:
    """The owner believes what it reads, not what the writer says."""
    last = host.write("swap", "whole")
    client = host.client("weights", o.Role.LOADER)
    now = host.info("swap")
    asked = o.BeginUpdate(model="swapped", from_version=last, owner_generation=now.owner_generation, whole=True)
    grant, fds = client.call(asked, o.UpdateGrant)
    for fd in fds:
        os.close(fd)
    said = tuple(bytes(len(one)) for one in grant.chunk_digests)
    lie = tuple(bytes([1]) + one[1:] for one in said)
    commit = o.CommitUpdate(
        model="swapped", version=last + 1, owner_generation=now.owner_generation, chunk_digests=lie,
        digest=root_digest(lie, grant.nbytes),
    )  # fmt: skip
    with pytest.raises(WeightsBroken, match="chunk 0 differs from its digest"):
        client.call(commit, o.WeightsInfo)
    assert (host.info("swap").state, host.info("swap").version) == ("sealed", last)


def test_an_owner_that_is_killed_has_it_all_again_and_a_reader_does_not_notice(host: DeviceOwners) -> None:
    host.write("swap", "whole")
    host.write("in_place", "delta")
    before = {mode: host.info(mode) for mode in MODELS}
    readers = {mode: host.reader(mode, f"of-{mode}") for mode in MODELS}
    held = {mode: seen_in(reader) for mode, reader in readers.items()}
    host.kill("weights")
    for mode, reader in readers.items():
        reader.check()
        assert seen_in(reader) == held[mode], "while there is no owner"
    host.up("weights")
    for mode, reader in readers.items():
        info = host.info(mode)
        assert (info.version, info.digest, info.state) == (before[mode].version, before[mode].digest, "sealed")
        eventually(
            lambda mode=mode: f"of-{mode}" in [row.who for row in host.info(mode).readers], what="the reader rejoins"
        )
        again = host.reader(mode)
        assert seen_in(again) == held[mode]
        again.close()
        reader.close()
    version = host.write("swap", "whole")
    assert version == before["swap"].version + 1, "an update in the new life"


def test_an_owner_that_is_killed_inside_an_update_gives_it_up(host: DeviceOwners) -> None:
    for mode in MODELS:
        last = host.write(mode, "whole")
        writer = host.writer(mode, "delta", last + 1, "written")
        writer.stopped("written")
        assert host.info(mode).state == "updating"
        host.reborn("weights")
        info = host.info(mode)
        assert (info.state, info.version) == ("sealed" if mode == "swap" else "torn", last)
        writer.kill()
    assert host.info("swap").staging == 0
    reader = host.reader("swap")
    assert seen_in(reader) == whole(host.info("swap").version)
    reader.close()
    host.write("in_place", "whole")


def test_memory_that_was_lost_is_loaded_from_the_files_or_torn(host: DeviceOwners) -> None:
    """Owner and holder killed: what came from the files comes from them again, an update is not passed off by them."""
    host.write("swap", "whole")
    lost = host.info("swap").version
    holder = host.holder_pid("weights")
    host.kill("weights")
    kill_pid(holder)
    status = host.up("weights")
    assert any(said.startswith(f"weights swapped v{lost}") for said in status.lost)
    assert host.info("swap").state == "torn"
    version = host.write("swap", "whole")
    assert version == lost + 1
    reader = host.reader("swap")
    assert seen_in(reader) == whole(version)
    reader.close()
    host.write("in_place", "whole")


def test_memory_of_another_kind_is_refused_by_both_sides(host: DeviceOwners) -> None:
    client = host.client("weights")
    if host.cuda is None:
        with pytest.raises(Refused, match="are in memfd, this process reads cuda_vmm"):
            GpuWeightsView(client, CudaVmm(driver_for(FAKE)), "swapped")
    else:
        with pytest.raises(Refused, match="are in cuda_vmm, this process reads memfd"):
            WeightsView(client, "swapped")


def test_a_writer_without_a_driver_is_refused_and_tears_nothing(host: DeviceOwners) -> None:
    device_only(host)
    for mode in MODELS:
        version = host.write(mode, "whole")
        with pytest.raises(HostUnfit, match="no driver is named"):
            begin_update(host.client("weights", o.Role.LOADER), MODELS[mode], mode=mode, driver="rocm")
        assert (host.info(mode).state, host.info(mode).version) == ("sealed", version)


def device_only(host: DeviceOwners) -> CudaVmm:
    if host.cuda is None:
        pytest.skip("of device memory; memfd has its own in tests/process/test_gpuowner_update.py and _survival.py")
    return host.cuda


KILLED = [("swap", "delta", point) for point in POINTS] + [
    ("in_place", "whole", point) for point in ("begun", "torn", "written", "commit_sent", "committed")
]


@pytest.mark.parametrize(("mode", "kind", "point"), KILLED)
def test_a_writer_killed_anywhere_leaves_one_version_whole_or_a_refusal(
    host: DeviceOwners, mode: str, kind: str, point: str
) -> None:
    device_only(host)
    if host.info(mode).state == "torn":
        host.write(mode, "whole")
    reader = host.reader(mode)
    if seen_in(reader) != whole(reader.grant.version):  # every case begins on one version throughout
        host.write(mode, "whole")
        reader.follow()
    last = reader.grant.version
    writer = host.writer(mode, kind, last + 1, point)
    writer.stopped(point)
    if mode == "swap":
        assert seen_in(reader) == whole(last), "while the writer stands still"
    writer.kill()
    now = eventually(lambda: (i := host.info(mode)).state in ("sealed", "torn") and i, what="the update ends")
    if now.state == "torn":
        assert mode == "in_place"
        assert point != "committed"
        with pytest.raises(WeightsTorn):
            host.reader(mode)
        with pytest.raises(WeightsTorn):
            reader.follow()
    else:
        assert now.version == last + 1 if point == "committed" else now.version in (last, last + 1)
        assert point in ("commit_sent", "committed") or now.version == last
        fresh = host.reader(mode)
        assert seen_in(fresh) == (whole(last) if now.version == last else whole(last) | changed(kind, last + 1))
        fresh.close()
    if mode == "swap":
        reader.check()
        assert seen_in(reader) == whole(last), "a reader that stays keeps its version"
    reader.close()


def test_a_stray_write_of_a_reader_ends_it_and_changes_nothing(host: DeviceOwners) -> None:
    device_only(host)
    reader = host.reader("swap")
    grant, fds = host.client("weights").call(o.AttachWeights(model="swapped"), o.WeightsGrant)
    ended = support.deed(host.memory, "poke-read", fds[0], grant.nbytes)
    assert ended < 0 or ended == support.FAULTED
    reader.check()
    reader.close()
    for fd in fds:
        os.close(fd)


def test_bytes_that_changed_while_the_owner_was_away_are_refused(host: DeviceOwners) -> None:
    cuda = device_only(host)
    last = host.write("swap", "whole")
    _, fds = host.client("weights").call(o.AttachWeights(model="swapped"), o.WeightsGrant)
    va = cuda.reserve(host.info("swap").nbytes)
    cuda.map(va, fds[0], host.info("swap").nbytes, Access.READ_WRITE)  # no seal forbids it on a device
    host.kill("weights")
    support.put(cuda, va + 4097, b"\x55")
    host.up("weights")
    with pytest.raises(WeightsTorn, match="differ from their digests"):
        host.reader("swap")
    assert host.write("swap", "whole") == last + 1
    host.reader("swap").close()
    cuda.unmap(va)
    cuda.free_va(va)
    for fd in fds:
        os.close(fd)


def test_an_owner_that_cannot_look_at_its_memory_does_not_start_and_loses_nothing(host: DeviceOwners) -> None:
    """A device that is full keeps the child that reads from its work: that is no torn version."""
    cuda = device_only(host)
    if host.memory != FAKE:
        pytest.skip("the size of the device is known on the fake one only")
    version = host.write("swap", "whole")
    digest = host.info("swap").digest
    host.kill("weights")
    hog = cuda.private(ROOM - used_bytes(NAME))
    again = host.daemon("gpuowner", "--kind", "weights")
    assert again.wait(120) == 3, "systemd tries again"
    said = next(host.root.glob("*owner_daemon*.log")).read_text().strip().splitlines()[-1]
    assert "no room on the device to read" in said
    cuda.release(hog)
    host.up("weights")
    info = host.info("swap")
    assert (info.state, info.version, info.digest) == ("sealed", version, digest)


def test_a_device_without_room_for_a_second_version_says_so_and_keeps_the_first(host: DeviceOwners) -> None:
    cuda = device_only(host)
    if host.memory != FAKE:
        pytest.skip("the size of the device is known on the fake one only")
    last = host.write("swap", "whole")
    nbytes = host.info("swap").nbytes
    free = ROOM - used_bytes(NAME)
    hog = cuda.private((free - nbytes // 2) // GRAIN * GRAIN)
    with pytest.raises(Refused, match="OUT_OF_MEMORY"):
        host.write("swap", "whole")
    assert (host.info("swap").state, host.info("swap").version) == ("sealed", last)
    host.write("in_place", "delta")
    cuda.release(hog)
    assert host.write("swap", "whole") == last + 1


def test_the_device_holds_what_the_owner_says_and_nothing_after_it_is_released(host: DeviceOwners) -> None:
    device_only(host)
    if host.memory != FAKE:
        pytest.skip("what others have on a real device is not known")
    host.reader("swap").close()
    host.write("swap", "whole")
    ours = 2 * GRAIN  # the small buffers of this process for results, as a reader and as a writer

    def accounted() -> bool:
        return used_bytes(NAME) == ours + sum(host.info(mode).resident for mode in MODELS)

    eventually(accounted, what="what is on the device is the ledger's")
    holder = host.holder_pid("weights")
    host.owners["weights"].terminate()
    assert host.owners["weights"].wait(120) == 0
    assert used_bytes(NAME) > ours, "a restart would find everything"
    kill_pid(holder)
    eventually(lambda: used_bytes(NAME) == ours, what="the device is empty")
    host.up("weights")
    assert {host.info(mode).state for mode in MODELS} == {"sealed"}
