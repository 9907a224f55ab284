"""The router's own life: refusals before it starts, SIGTERM in mid-stream, SIGKILL and return."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from belayer import refusals
from belayer.errors import Refused
from belayer.localhost import free_port
from belayer.messages.common import FaultProof, Ping, Pong
from belayer.messages.router import InjectFrontFault
from belayer.paths import Paths
from belayer.rpc import SyncClient, call_sync
from belayerd.router.journal_reader import read
from tests.support.router_host import MODEL, RouterHost, config_text, spawn_router
from tests.support.streams import Stream, completion
from tests.support.wait import eventually


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        yield Path(folder)


def refused(root: Path, config: Path | None = None) -> str:
    """Start a router that must refuse: exit 2, one sentence, nothing left. Returns the sentence."""
    process, log = spawn_router(root, config)
    try:
        assert process.wait(300) == 2
    finally:
        process.kill()
        log.close()
    said = (root / "router.log").read_text()
    assert "Traceback" not in said
    assert not Paths(root).router_sock.exists()
    sentences = [line for line in said.splitlines() if "router: " in line or "__main__: " in line]
    assert len(sentences) == 1
    return sentences[0]


def test_a_port_in_use_is_named(root: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        Paths(root).config.write_text(config_text(port, ["s0"]))
        assert f"port {port} of 127.0.0.1 is in use" in refused(root)
    said = refusals.why_silent(Paths(root).run, "router")
    assert said.startswith("belayer-router refused to start ")
    assert f"port {port} of 127.0.0.1 is in use" in said


def test_a_missing_configuration_is_named(root: Path) -> None:
    assert str(root / "none.toml") in refused(root, root / "none.toml")


def test_slots_of_two_models_are_refused(root: Path) -> None:
    text = config_text(free_port(), ["s0"])
    text += f'[[model]]\nname = "other"\npath = "{MODEL}"\n[[slot]]\nname = "s1"\nmodel = "other"\n'
    Paths(root).config.write_text(text)
    assert "one model" in refused(root)


def test_a_model_that_cannot_be_read_is_named(root: Path) -> None:
    model = root / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "config.json").write_text("{ not json")
    text = config_text(free_port(), ["s0"]).replace(str(MODEL), str(model))
    Paths(root).config.write_text(text)
    assert str(model) in refused(root)


def test_a_second_router_is_refused_and_sigterm_ends_streams_with_an_error(root: Path) -> None:
    host = RouterHost.start(root, ["s0"])
    try:
        assert host.status().fronts == ()
        with pytest.raises(Refused, match="its own process"):
            host.rpc.call(InjectFrontFault(front=0, kind="kill"), FaultProof)
        process, log = spawn_router(root)
        assert process.wait(300) == 2
        log.close()
        assert "already runs" in (root / "router.log").read_text()
        fake = host.worker("s0", "--hold-at", "3")
        stream = Stream(host.url, "/v1/completions", completion(30))
        stream.start()
        eventually(lambda: host.slot("s0").tokens_total == 3, what="the stream has begun")
        eventually(lambda: len(stream.seen.token_ids) == 3, what="the client has it")
        host.process.send_signal(signal.SIGTERM)
        seen = stream.result()
        assert "the router is stopping" in seen.errors[0]["message"]
        assert seen.finishes == []
        assert host.process.wait(300) == 0
        assert not Paths(root).router_sock.exists()
        assert fake.process.poll() is None
        assert "Traceback" not in (root / "router.log").read_text()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{host.url}/health", timeout=300)
    finally:
        for one in host.fakes:
            one.process.kill()
            one.process.wait(300)
        host.fakes.clear()
        host.stop()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_router_stopped_while_it_starts_leaves_nothing(root: Path) -> None:
    port = free_port()
    Paths(root).config.write_text(config_text(port, ["s0"]))
    process, log = spawn_router(root)
    try:
        eventually(lambda: listens(port), what="the port is taken: it goes on to import vLLM")
        loading = f"belayer-router does not answer: pid {process.pid} is loading, or hangs"
        assert refusals.why_silent(Paths(root).run, "router") == loading
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        process.kill()
        log.close()
    assert not Paths(root).router_sock.exists()
    assert "Traceback" not in (root / "router.log").read_text()


def test_sigkill_and_return(root: Path) -> None:
    """The journal is whole, the port and the lock are free, another instance takes the same workers."""
    host = RouterHost.start(root, ["s0"], "journal_every = 4")
    try:
        fake = host.worker("s0", "--hold-at", "10")
        stream = Stream(host.url, "/v1/completions", completion(30))
        stream.start()
        eventually(lambda: host.slot("s0").tokens_total == 10, what="the stream has begun")
        old = call_sync(Paths(root).router_sock, Ping(), Pong).instance
        host.process.kill()
        assert host.process.wait(300) == -signal.SIGKILL
        assert stream.result().finishes == []
        (story,) = read(Paths(root).journal).stories.values()
        assert (len(story.tokens), story.reason) == (8, "")
        host.process, host.log = spawn_router(root)
        eventually(host.answers, within=300, what="the router is back", every=0.1)
        assert call_sync(Paths(root).router_sock, Ping(), Pong).instance != old
        host.rpc.close()
        host.rpc = SyncClient(Paths(root).router_sock)
        host.register(fake)
        fake.release()
        answer = httpx.post(
            f"{host.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 12}, timeout=300
        )
        assert answer.json()["usage"]["completion_tokens"] == 12
    finally:
        host.stop()


def test_help_is_quick_and_imports_no_engine() -> None:
    import sys

    code = "import belayerd.router.__main__, sys; print('vllm' in sys.modules, 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout.lower().replace(" ", ",").join("[]")) == [False, False]
