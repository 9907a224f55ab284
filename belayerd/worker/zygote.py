"""``python -m belayerd.worker.zygote [--config PATH]``: imports vLLM once, then forks workers in milliseconds.

It stays single-threaded, because a fork copies only the calling thread: a lock held by another one would stay locked
in the child for ever. It serves all slots, holds no engine, and outlives belayerd; its children outlive it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from belayer import lastwords, log, procs, wire
from belayer.clock import Stopwatch
from belayer.config import Config, load
from belayer.daemon import OnlyOne, new_instance, notify, say
from belayer.errors import BelayerError, HostUnfit, Refused, WorkerFailed
from belayer.ids import is_name
from belayer.messages import worker as m
from belayer.messages.common import Ping, Pong
from belayer.paths import Paths
from belayer.rpc import to_reply
from belayer.seqpacket import recv_fds
from belayerd.worker import gpu_switch, ranks

MAX_REQUEST = 16 << 10
_ENDS = 64  # belayerd asks at once, or never
_JOIN_DEADLINE_S = 5.0

# Read by torch, OpenMP and vLLM at import, so they must be set before it. Values given from outside win.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU platform forces a second process per engine
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # eager engines: the first logprobs request would otherwise compile for 2 s
}

IMPORTS = (
    "belayerd.worker.adapter.arena",
    "belayerd.worker.main",
    "vllm.v1.executor.uniproc_executor",
    "belayerd.worker.adapter.group",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "xgrammar",
    # What vLLM imports only when it builds an engine; seen as what a worker's sys.modules has and the zygote's had not.
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.pool.flash_maxsim",
    "vllm.model_executor.layers.quantization.online.base",
)


CPU_IMPORTS = ("vllm.v1.attention.backends.cpu_attn", "xgrammar.kernels.apply_token_bitmask_inplace_cpu")

# Of slots on a GPU (docs/h200.md). Read at import or by the driver's first call, both of which come later; the same
# names as in adapter/gpu_worker, which looks at them again.
GPU_ENVIRONMENT = {
    "NCCL_GRAPH_REGISTER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the owners' device 0 is this process's device 0
}
GPU_IMPORTS = ("belayerd.worker.adapter.gpu_attach", "belayerd.worker.adapter.gpu_worker")


class Child(NamedTuple):
    pid: int
    worker_id: str
    cgroup: str
    kills: lastwords.Kills  # of the OOM killer, before it was forked


class Zygote:
    """Answers SpawnWorker with the child's pidfd. Single-threaded select loop."""

    def __init__(self, config: Config, paths: Paths, logger: Any) -> None:
        self._config, self._paths, self._log = config, paths, logger
        self._instance = new_instance()
        self._decoder: wire.Decoder[Any] = wire.Decoder(m.ZygoteRequest)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}  # by pidfd
        self._ends: dict[str, str] = {}  # how the last children ended, by worker id
        self._stop = False
        path = paths.zygote_sock
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        old = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(old)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        """Until SIGTERM or SIGINT. Children go on."""
        wake_r, wake_w = socket.socketpair()
        for sock in (wake_r, wake_w):
            sock.setblocking(False)
        signal.set_wakeup_fd(wake_w.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._selector.register(wake_r, selectors.EVENT_READ, lambda: wake_r.recv(64))
        while not self._stop:
            for key, _ in self._selector.select():
                key.data()
        self._paths.zygote_sock.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._readable(sock))

    def _readable(self, sock: socket.socket) -> None:
        try:
            data, fds, flags = recv_fds(sock, MAX_REQUEST, 1)
        except OSError:
            data, fds, flags = b"", (), 0
        for fd in fds:
            os.close(fd)
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._close(sock)
            return
        reply, pidfd = self._answer(data)
        try:
            socket.send_fds(sock, [wire.encode(reply)], [pidfd] if pidfd is not None else [])
        except OSError:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    def _answer(self, data: bytes) -> tuple[msgspec.Struct, int | None]:
        try:
            message = self._decoder.decode(data)
            if isinstance(message, Ping):
                return Pong(daemon="zygote", pid=os.getpid(), instance=self._instance), None
            if isinstance(message, m.HowEnded):
                return self._how_ended(message.worker_id), None
            return self._spawn(message)
        except BelayerError as why:
            self._log.warning("declined", why=str(why))
            return to_reply(why), None
        except OSError as why:  # fork or cgroup: no child is left behind
            self._log.error("spawn_failed", why=str(why))
            return to_reply(WorkerFailed(f"fork: {why}", kept="the zygote")), None

    def _spawn(self, message: m.SpawnWorker) -> tuple[m.Spawned, int]:
        if not is_name(message.worker_id) or message.slot not in {slot.name for slot in self._config.slot}:
            raise Refused(f"no worker {message.worker_id!r} can be made for slot {message.slot!r}")
        watch, kills = Stopwatch(), lastwords.oom_kills(message.cgroup)
        joined_r, joined_w = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            become_worker(message, self._config, self._paths, joined_w)
        os.close(joined_w)
        pidfd = os.pidfd_open(pid)  # the child cannot have been reaped: only we reap it
        self._children[pidfd] = Child(pid, message.worker_id, message.cgroup, kills)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd))
        try:
            self._wait_joined(joined_r, pidfd, message)
        finally:
            os.close(joined_r)
        self._log.info("spawned", worker=message.worker_id, pid=pid, ms=round(watch.ms(), 1))
        return m.Spawned(worker_id=message.worker_id, pid=pid, start_time=procs.start_time(pid)), pidfd

    def _wait_joined(self, pipe: int, pidfd: int, message: m.SpawnWorker) -> None:
        """The child says one byte once it is in its control group: only then can a fence be sure to reach it."""
        with selectors.DefaultSelector() as wait:
            wait.register(pipe, selectors.EVENT_READ)
            if not wait.select(_JOIN_DEADLINE_S) or os.read(pipe, 1) != b"1":
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # not reaped yet, so this cannot be another process
                raise WorkerFailed(
                    f"worker {message.worker_id} could not join its control group {message.cgroup}",
                    kept="no worker: the child was killed",
                )

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._ends[child.worker_id] = lastwords.how(code, child.pid, child.kills, lastwords.oom_kills(child.cgroup))
        if len(self._ends) > _ENDS:
            del self._ends[next(iter(self._ends))]
        self._log.info("ended", worker=child.worker_id, pid=child.pid, status=code, how=self._ends[child.worker_id])

    def _how_ended(self, worker_id: str) -> m.WorkerEnd:
        for pidfd, child in list(self._children.items()):
            if child.worker_id == worker_id and procs.is_dead(pidfd):  # the question came before the news
                self._reap(pidfd)
        return m.WorkerEnd(worker_id=worker_id, said=self._ends.get(worker_id, ""))


def become_worker(message: m.SpawnWorker, config: Config, paths: Paths, joined: int) -> None:
    """In the child: join the control group, leave everything of the zygote behind, run. Never returns."""
    code = 1
    try:
        if message.cgroup:
            (Path(message.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
        os.setsid()
        os.write(joined, b"1")
        _cut_ties(paths.log(message.worker_id))
        import_module("belayerd.worker.main").run(message.worker_id, message.slot, config, paths)
        code = 0
    except BaseException as why:  # noqa: BLE001 the zygote's stack must never be unwound in the child
        sys.excepthook(*sys.exc_info())
        ranks.let_speak()
        lastwords.leave(paths.last_words(message.worker_id), lastwords.words_of(why))
    finally:
        with contextlib.suppress(OSError):  # a log on a full disk
            sys.stderr.flush()
        os._exit(code)


def _cut_ties(log_path: Path) -> None:
    """Own log, no inherited descriptor (the zygote's lock and sockets), default signals."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.closerange(3, 1 << 16)


def import_engine(config: Config) -> float:
    """Import and preload all that workers share; returns milliseconds. Raises HostUnfit when a hook does not fit."""
    watch = Stopwatch()
    try:
        import_module("belayerd.worker.adapter.checks").self_check()
        on_gpu = any(slot.device != "cpu" for slot in config.slot)
        if on_gpu:
            os.environ.update(GPU_ENVIRONMENT)
            import_module("belayerd.worker.adapter.gpu_checks").self_check()
        for name in (*IMPORTS, *(GPU_IMPORTS if on_gpu else CPU_IMPORTS)):
            import_module(name)
        preload = import_module("belayerd.worker.adapter.core").preload
        args_for = import_module("belayerd.worker.placed").args_for
        for slot in config.slot:
            model = config.model_named(slot.model)
            preload(model, slot, config.router, args_for(model, slot, config.router))
        if on_gpu and import_module("torch").cuda.is_initialized():
            raise HostUnfit("importing vLLM has made a CUDA context: no child of this process could use the GPU")
    except ImportError as why:
        raise HostUnfit(f"vLLM cannot be imported: {why}", remedy="run `make setup`") from why
    return watch.ms()


def main() -> int:
    parser = argparse.ArgumentParser(prog="belayerd.worker.zygote", description="Forks workers for belayerd.")
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        paths = Paths().make()
    except BelayerError as why:
        return say(why)
    try:
        return _serve(args.config, paths)
    except BaseException as why:
        lastwords.leave(paths.last_words("zygote"), lastwords.words_of(why))
        if isinstance(why, BelayerError):
            return say(why)
        raise


def _serve(config_path: Path | None, paths: Paths) -> int:
    logger = log.setup("zygote")
    config = load(config_path or paths.config)
    gpu_switch.refuse(config)
    lock = OnlyOne(paths.run, "zygote")
    ms = import_engine(config)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise HostUnfit(f"{threads} threads after importing vLLM: a fork would not be safe")
    gc.freeze()  # keep what was imported out of the children's collections, and its pages shared
    zygote = Zygote(config, paths, logger)
    notify("READY=1")
    logger.info("serving", import_ms=round(ms))
    zygote.serve()
    del lock
    return 0


if __name__ == "__main__":
    sys.exit(main())
