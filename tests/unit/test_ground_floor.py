"""Wire, state files, heartbeat, config and rpc: refused by name, never guessed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from belayer import config as configs
from belayer import rpc, statefile, wire
from belayer.daemon import OnlyOne
from belayer.errors import (
    BadMessage,
    BelayerError,
    ConfigInvalid,
    DaemonUnreachable,
    ErrorCode,
    Fenced,
    HostUnfit,
    Refused,
    from_code,
)
from belayer.heartbeat import Beat, Watch
from belayer.ids import is_name, new_worker_id, slot_of
from belayer.messages import common, control, owner, router, sandbox, trainer, worker
from belayer.messages.common import Done, Ping, Pong
from belayer.paths import Paths
from belayer.story import Incidents
from belayer.trajectory import context_digest

MODULES = (common, control, owner, router, sandbox, trainer, worker)


def all_messages() -> list[type[common.Message]]:
    found = {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, common.Message) and value is not common.Message
    }
    return sorted(found, key=lambda kind: kind.__name__)


# --- wire ---


def test_the_wire_is_plain_messagepack_with_the_class_name_as_tag() -> None:
    data = wire.encode(Done(ms=1.5, detail="seen"))
    assert msgpack.unpackb(data) == {"type": "Done", "ms": 1.5, "detail": "seen"}


@pytest.mark.parametrize("kind", all_messages(), ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_and_tagged_by_its_name(kind: type[common.Message]) -> None:
    info = kind.__struct_config__
    assert info.frozen
    assert info.tag == kind.__name__


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decoded = wire.Decoder[Any](router.Request).decode(data)
        assert isinstance(decoded, common.Message)


def test_oversize_is_refused_before_decoding() -> None:
    with pytest.raises(BadMessage, match="over the cap"):
        wire.Decoder[Any](router.Request).decode(b"\x00" * (wire.MAX_MESSAGE + 1))


def test_unknown_fields_are_ignored_on_the_wire() -> None:
    data = msgpack.packb({"type": "Ping", "protocol": 1, "from_the_future": True})
    assert wire.Decoder[Any](router.Request).decode(data) == Ping()


def test_errors_travel_by_code() -> None:
    again = from_code("fenced", "old epoch 3", "all", "retry")
    assert isinstance(again, Fenced)
    assert str(again) == "old epoch 3; kept: all; retry"
    assert type(from_code("invented", "x")) is BelayerError
    codes = [kind.code for kind in BelayerError.__subclasses__() if kind.__module__ == "belayer.errors"]
    assert len(codes) == len(set(codes)), "one class per code"
    assert set(codes) | {ErrorCode.BROKEN} == set(ErrorCode)


# --- state files ---


def test_state_is_absent_whole_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state"
    assert statefile.load(path, Done) is None
    statefile.save(path, Done(detail="kept"))
    assert statefile.load(path, Done) == Done(detail="kept")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(statefile.StateDamaged, match="damaged"):
        statefile.load(path, Done)


def test_a_failed_write_keeps_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    statefile.save(path, Done(detail="old"))
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.mkdir()  # the temporary file cannot be made
    with pytest.raises(OSError, match="directory"):
        statefile.save(path, Done(detail="new"))
    assert statefile.load(path, Done) == Done(detail="old")


def test_a_second_daemon_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    first = OnlyOne(tmp_path, "belayerd")
    with pytest.raises(HostUnfit, match=f"pid {os.getpid()}"):
        OnlyOne(tmp_path, "belayerd")
    os.close(first._fd)  # what the kernel does on SIGKILL
    OnlyOne(tmp_path, "belayerd")


# --- heartbeat ---


def test_a_beat_is_seen_as_change_and_aged_by_the_watcher(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    watch = Watch(path, now=100.0)
    assert watch.observe(101.0).pulse is None
    beat = Beat(path)
    beat.beat("decode", step=1, waiting=0, running=2, tokens=5)
    seen = watch.observe(102.0)
    assert seen.age_s == 0.0
    assert seen.pulse is not None
    assert (seen.pulse.phase, seen.pulse.step, seen.pulse.running) == ("decode", 1, 2)
    assert watch.observe(105.0).age_s == 3.0
    os.utime(path, ns=(0, 1))  # a clock that jumps back is a change, not an age
    assert watch.observe(106.0).age_s == 0.0
    beat.close()


def test_a_loop_without_steps_is_flat_only_while_it_has_work(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    beat, watch = Beat(path), Watch(path, now=0.0)
    for now in range(1, 6):
        beat.beat("decode", step=3, waiting=1, running=0, tokens=9)
        os.utime(path, ns=(now, now))
        seen = watch.observe(float(now))
    assert seen.steps_flat_s == 4.0
    beat.beat("idle", step=3, waiting=0, running=0, tokens=9)
    os.utime(path, ns=(99, 99))
    assert watch.observe(9.0).steps_flat_s == 0.0
    beat.close()


# --- names, digests, stories ---


def test_names_are_safe_as_files() -> None:
    assert is_name("slot0")
    for bad in ("", "Slot", "../x", "a/b", "-a", "a" * 49, "a\n"):
        assert not is_name(bad)
    assert slot_of(new_worker_id("my-slot")) == "my-slot"


def test_equal_contexts_have_one_digest() -> None:
    assert context_digest([{"a": 1, "b": 2}]) == context_digest([{"b": 2, "a": 1}])
    assert context_digest([{"a": 1}]) != context_digest([{"a": 2}])


def test_incidents_are_readable_by_another_process_and_newest_first(tmp_path: Path) -> None:
    store = Incidents(tmp_path / "incidents.db")
    base = {"slot": "slot0", "cause": "death", "detail": "", "from_generation": 1, "to_generation": 2}
    for n, at in ((1, 10.0), (2, 20.0)):
        store.put(control.Incident(incident_id=f"inc-{n}", at=at, outcome="open", **base))
    store.put(control.Incident(incident_id="inc-1", at=10.0, outcome="served", **base))
    reader = Incidents(tmp_path / "incidents.db")
    assert [(row.incident_id, row.outcome) for row in reader.latest()] == [("inc-2", "open"), ("inc-1", "served")]
    store.transition(1.0, "slot0", "protected", "handover", "WorkerLost", 1)
    assert reader.story("slot0") == [(1.0, "protected", "handover", "WorkerLost", 1)]
    reader.close()
    store.close()


# --- configuration ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


GOOD = '[[model]]\nname = "m"\npath = "model"\n[[slot]]\nname = "slot0"\nmodel = "m"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "belayer.toml"
    path.write_text(text)
    return path


def test_a_good_file_has_absolute_model_paths(tmp_path: Path, model: Path) -> None:
    config = configs.load(write(tmp_path, GOOD))
    assert config.model_named("m").path == str(model)
    assert config.slot_named("slot0").hang_limit_s > 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = ", ["not TOML"]),
        ("[router]\nprot = 1\n", ["router", "prot", "known keys", "port"]),
        ('[envkeeper]\nimage = ""\n', ["envkeeper.image"]),
        ('[router]\nport = "eighty"\n', ["router.port", "int"]),
        ("[router]\nport = 0\n", ["router.port"]),
        ("[router]\nport = 70000\n", ["router.port"]),
        (GOOD.replace('model = "m"', 'model = "other"'), ["slot[0].model", "other"]),
        (GOOD.replace('path = "model"', 'path = "missing"'), ["model[0].path", "config.json"]),
        (GOOD.replace('"slot0"', '"Slot/0"'), ["slot[0].name", "no name"]),
        (GOOD + '[[slot]]\nname = "slot0"\nmodel = "m"\n', ["slot[1].name", "twice"]),
        (GOOD + "hang_limit_s = 0.01\n", ["slot[0].hang_limit_s", "policy.poll_s"]),
        (GOOD + "kv_bytes = -1\n", ["slot[0].kv_bytes"]),
        (GOOD + "block_size = 16\n", ["slot[0].block_size", "multiple of 32"]),
        (GOOD + "[router]\nfronts = 0\n", ["router.fronts"]),
        (
            GOOD + 'packed_weights = true\ndevice = "gpu"\n[gpuowner]\nmemory = "cuda_vmm"\n',
            ["slot[0].packed_weights", "for the CPU"],
        ),
        (GOOD + "tensor_parallel = 0\n", ["slot[0].tensor_parallel"]),
        (GOOD + "tensor_parallel = 2\nkv_reuse = true\n", ["slot[0].kv_reuse", "tensor_parallel"]),
        (
            GOOD + 'tensor_parallel = 2\ndevice = "gpu"\n[gpuowner]\nmemory = "cuda_vmm"\n',
            ["slot[0].tensor_parallel", "CPU only"],
        ),
        (
            GOOD + 'tensor_parallel = 2\n[[slot]]\nname = "slot1"\nmodel = "m"\n',
            ["slot[1].tensor_parallel", "same for all slots"],
        ),
        (GOOD.replace("[[slot]]", "[slot]"), ["slot: expected `array`", "[[slot]]"]),
        (GOOD.replace('path = "model"', 'path = "model"\ndtype = "bf16"'), ["model[0].dtype", "'bf16'", "'bfloat16'"]),
        ('[envkeeper]\nengine_path = "slow"\n', ["envkeeper.engine_path", "'fast'", "'docker_api'"]),
        ('[envkeeper]\ndocker = "/var/run/docker.sock"\n', ["envkeeper.docker", "unix:///PATH"]),
        (GOOD + "[router]\nrequest_deadline_s = 5.0\n", ["router.request_deadline_s", "fence_deadline_s"]),
    ],
)
def test_a_bad_file_names_file_key_and_reason(tmp_path: Path, model: Path, text: str, names: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigInvalid) as caught:
        configs.load(path)
    for name in [str(path), *names]:
        assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"nowhere\.toml"):
        configs.load(tmp_path / "nowhere.toml")


def test_a_root_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="too long"):
        Paths("/tmp/" + "x" * 80)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigInvalid, match="not a directory"):
        Paths(tmp_path / "root")


# --- rpc ---


def serve(path: Path, body: Any) -> Any:
    """Run ``body(client)`` against a server whose handler refuses Done and answers Ping."""

    async def handler(message: Any) -> msgspec.Struct:
        if isinstance(message, router.RouterStatus):
            raise Fenced("generation 1 is old", kept="generation 2")
        return Pong(daemon="test", pid=os.getpid(), instance="i1")

    async def main() -> Any:
        server = rpc.Server(path, router.Request, handler)
        task = asyncio.create_task(server.serve())
        client = rpc.Client(path)
        try:
            return await body(client)
        finally:
            client.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return asyncio.run(main())


def test_calls_in_flight_each_get_their_own_answer(tmp_path: Path) -> None:
    async def body(client: rpc.Client) -> list[Any]:
        return await asyncio.gather(*(client.call(Ping(), Pong) for _ in range(50)))

    assert len(serve(tmp_path / "s", body)) == 50


def test_a_refusal_is_the_same_error_on_the_other_side(tmp_path: Path) -> None:
    async def body(client: rpc.Client) -> None:
        with pytest.raises(Fenced, match="generation 1 is old"):
            await client.call(router.RouterStatus(), router.RouterStatusReply)

    serve(tmp_path / "s", body)


def test_garbage_frames_do_not_harm_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def body(client: rpc.Client) -> Pong:
        raw = client._context.socket(zmq.DEALER)
        raw.set(zmq.LINGER, 0)
        raw.connect(f"ipc://{path}")
        for frames in ([b""], [b"\xff" * 10], [b"call", b"\xc1garbage"], [b"a", b"b", b"c", b"d"]):
            await raw.send_multipart(frames)
        call, data = await raw.recv_multipart()
        assert call == b"call"
        assert msgpack.unpackb(data)["code"] == "bad_message"
        raw.close()
        return await client.call(Ping(), Pong)

    assert serve(path, body).daemon == "test"


def test_what_the_server_would_not_take_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    """Its socket ends the connection over it: nobody would ever answer."""
    huge = Pong(daemon="x" * wire.MAX_MESSAGE, pid=1, instance="i1")

    async def body(client: rpc.Client) -> str:
        with pytest.raises(Refused, match=f"is over the {wire.MAX_MESSAGE}"):
            await client.call(huge, Pong, 300.0)
        alone = rpc.SyncClient(tmp_path / "s")
        with pytest.raises(Refused, match="it was not sent"):
            await asyncio.to_thread(alone.call, huge, Pong, 300.0)
        alone.close()
        return (await client.call(Ping(), Pong)).daemon

    assert serve(tmp_path / "s", body) == "test"


def test_a_client_that_nobody_closed_is_collected(tmp_path: Path) -> None:
    """It hung for ever: what ends a zmq context waits for its sockets. An error that is kept holds its client in such a
    circle. In a process of its own, which also shows that it ends."""
    program = (
        "import gc, sys, weakref\n"
        "from pathlib import Path\n"
        "from belayer import rpc\n"
        "seen = []\n"
        "for _ in range(3):\n"
        "    client = rpc.SyncClient(Path(sys.argv[1]))\n"
        "    client.me = client\n"
        "    seen.append(weakref.ref(client))\n"
        "    del client\n"
        "gc.collect()\n"
        "print(sum(one() is None for one in seen))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_one_process_may_hold_more_clients_than_zmq_allows_by_itself(tmp_path: Path) -> None:
    clients = [rpc.SyncClient(tmp_path / "s") for _ in range(1200)]
    for client in clients:
        client.close()


def test_a_daemon_that_is_down_is_unreachable_within_the_bound(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no socket"):
        rpc.call_sync(tmp_path / "none", Ping(), Pong, 0.2)

    async def call() -> None:
        client = rpc.Client(tmp_path / "none")
        try:
            await client.call(Ping(), Pong, 0.1)
        finally:
            client.close()

    with pytest.raises(DaemonUnreachable, match=r"0\.1 s"):
        asyncio.run(call())


def test_the_socket_is_closed_to_other_users(tmp_path: Path) -> None:
    async def body(client: rpc.Client) -> int:
        await client.call(Ping(), Pong)
        return (tmp_path / "s").stat().st_mode & 0o777

    assert serve(tmp_path / "s", body) == 0o600
