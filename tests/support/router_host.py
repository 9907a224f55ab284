"""A real router process and fake workers around it, for tests: started, watched, and always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import zmq
from tokenizers import Tokenizer

from belayer import procs, wire
from belayer.errors import BelayerError, WorkerGone
from belayer.localhost import free_port
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.router import (
    RegisterWorker,
    RouterSlot,
    RouterStatus,
    RouterStatusReply,
    SlotsGivenUp,
    UnregisterWorker,
)
from belayer.messages.worker import WorkerStatus, WorkerStatusReply
from belayer.paths import Paths
from belayer.rpc import SyncClient, call_sync, decode_reply
from tests.support.last_words import of_logs
from tests.support.wait import eventually

TREE = Path(__file__).parents[2]
MODEL = TREE / ".cache/models/SmolLM2-135M-Instruct"

# What the recorded engine says: several bytes per character, so that a cut may fall inside one.
TEXT = "The rope holds: größer als gedacht, 東京タワー, 🙂🙃 and €5. Naïve façade, ёлка; "


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def write_record(path: Path) -> list[int]:
    tokens: list[int] = tokenizer().encode(TEXT, add_special_tokens=False).ids
    path.write_text(json.dumps(tokens))
    return tokens


def config_text(port: int, slots: list[str], router: str = "", urls: bool = False) -> str:
    """``urls``: each slot has a URL of its own too."""
    rows = ""
    for name in slots:
        rows += f'[[slot]]\nname = "{name}"\nmodel = "smollm2"\nmax_model_len = 2048\n'
        rows += f"url_port = {free_port()}\n" if urls else ""
    return (
        f'[[model]]\nname = "smollm2"\npath = "{MODEL}"\n{rows}'
        "[policy]\nfence_deadline_s = 0.5\nstep_deadline_s = 0.5\n"
        f'[router]\nhost = "127.0.0.1"\nport = {port}\n{router}\n'
    )


@dataclass
class FakeWorker:
    """One life of a recorded engine."""

    slot: str
    generation: int
    worker_id: str
    endpoint: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """SIGKILL, and proof that it is gone."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(300) == -signal.SIGKILL

    def stop(self) -> None:
        """It stands still, and is proven to."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(lambda: procs.state(self.process.pid) == "T", what="the worker stands still")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def release(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def babble(self) -> None:
        self.process.send_signal(signal.SIGUSR2)

    def running(self) -> int:
        """How many requests its engine holds, asked as belayerd asks."""
        context = zmq.Context()
        with context.socket(zmq.DEALER) as sock:
            sock.set(zmq.LINGER, 0)
            sock.connect(self.endpoint)
            sock.send_multipart([b"ctl", b"1", wire.encode(WorkerStatus())])
            assert sock.poll(300_000)
            reply = decode_reply(sock.recv_multipart()[2], WorkerStatusReply)
        context.term()
        return reply.running


@dataclass
class RouterHost:
    root: Path
    port: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    record: list[int]
    rpc: SyncClient
    fakes: list[FakeWorker] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, root: Path, slots: list[str], router: str = "", urls: bool = False) -> RouterHost:
        port = free_port()
        paths = Paths(root).make()
        paths.config.write_text(config_text(port, slots, router, urls))
        record = write_record(root / "record.json")
        process, log = spawn_router(root)
        host = cls(root, port, process, log, record, SyncClient(paths.router_sock))
        try:
            eventually(host.answers, within=900, what=f"router answers Ping; see {root}/router.log", every=0.1)
        except BaseException as why:
            why.add_note(of_logs(root))
            host.stop()  # nobody has it yet who could
            raise
        return host

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.root / "router.log").read_text()[-3000:]
        try:
            return call_sync(Paths(self.root).router_sock, Ping(), Pong, 5.0).daemon == "belayer-router"
        except BelayerError:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def worker(self, slot: str, *args: str, register: bool = True) -> FakeWorker:
        """The next life of a slot's worker, registered with the router unless told otherwise."""
        generation = self.lives[slot] = self.lives.get(slot, 0) + 1
        worker_id = f"{slot}-{generation:08x}"
        endpoint = f"ipc://{Paths(self.root).worker_sock(worker_id)}"
        command = [sys.executable, "-m", "tests.support.fake_worker", "--endpoint", endpoint, "--slot", slot]
        command += ["--generation", str(generation), "--worker-id", worker_id]
        command += ["--record", str(self.root / "record.json"), "--tell", str(self.root / "told"), *args]
        process = subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "bound\n"
        fake = FakeWorker(slot, generation, worker_id, endpoint, process)
        self.fakes.append(fake)
        if register:
            self.enroll(fake)
        return fake

    def enroll(self, fake: FakeWorker) -> None:
        """Registered: also where the worker was too slow for the router's first question, and has answered since."""
        try:
            self.register(fake)
        except WorkerGone:
            eventually(lambda: self.slot(fake.slot).registered, what=f"{fake.worker_id} answers, and serves")

    def register(self, fake: FakeWorker) -> Done:
        return self.rpc.call(
            RegisterWorker(
                slot=fake.slot,
                generation=fake.generation,
                worker_id=fake.worker_id,
                endpoint=fake.endpoint,
                model="smollm2",
                weight_version=1,
            ),
            Done,
            300.0,
        )

    def unregister(self, fake: FakeWorker, *, gone: bool = False, reason: str = "killed") -> Done:
        return self.rpc.call(
            UnregisterWorker(slot=fake.slot, generation=fake.generation, gone=gone, reason=reason), Done, 60.0
        )

    @contextmanager
    def given_up(self, *slots: str) -> Iterator[None]:
        """belayerd's word that only an operator brings these slots back, taken back in the end."""
        self.rpc.call(SlotsGivenUp(slots=slots), Done)
        try:
            yield
        finally:
            self.rpc.call(SlotsGivenUp(slots=()), Done)

    def kill_and_return(self) -> None:
        """SIGKILL the router; start it again; register the workers that live, as belayerd does."""
        self.process.kill()
        assert self.process.wait(300) == -signal.SIGKILL
        self.come_back()

    def come_back(self) -> None:
        self.rpc.close()
        self.log.close()
        self.process, self.log = spawn_router(self.root)
        eventually(self.answers, within=900, what=f"router is back; see {self.root}/router.log", every=0.1)
        self.rpc = SyncClient(Paths(self.root).router_sock)
        for fake in self.fakes:
            if fake.process.poll() is None and self.lives[fake.slot] == fake.generation:
                self.enroll(fake)

    def told(self) -> list[str]:
        """What the engines wrote down: "add ID TOKENS", "abort ID", "drop ID", in order."""
        path = self.root / "told"
        return path.read_text().splitlines() if path.exists() else []

    def metric(self, line: str) -> float:
        """The value of a metric; ``line``: its name with its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{line} ")), 0.0)

    def status(self) -> RouterStatusReply:
        return self.rpc.call(RouterStatus(), RouterStatusReply, 300.0)

    def slot(self, name: str) -> RouterSlot:
        return next(row for row in self.status().slots if row.slot == name)

    def clear(self) -> None:
        """End all fake workers and take their slots out: the next test starts with none."""
        for fake in self.fakes:
            if fake.process.poll() is None:
                fake.process.kill()
            fake.process.wait(300)
            if fake.process.stdout is not None:
                fake.process.stdout.close()
            if self.lives[fake.slot] == fake.generation:
                self.unregister(fake, gone=True, reason="planned: the test is over")
        self.fakes.clear()

    def stop(self) -> None:
        self.clear()
        self.rpc.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(300)
        self.log.close()


def spawn_router(root: Path, config: Path | None = None) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    log = (root / "router.log").open("ab")
    command = [sys.executable, "-m", "belayerd.router", "--config", str(config or Paths(root).config)]
    env = {**os.environ, "BELAYER_ROOT": str(root)}
    return subprocess.Popen(command, cwd=TREE, env=env, stdout=log, stderr=log), log
