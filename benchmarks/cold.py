"""What a cold restart costs: the baseline of every handover figure. Runs stock vLLM, none of our code.

Two baselines, each a fresh process from ``exec`` to the first token of a request with the same context length:

- engine: the leanest restart there is, vLLM's EngineCore in one process with explicit KV bytes;
- server: vLLM's own API server, asked over HTTP, as a framework would restart it.

``python -m benchmarks.cold MODEL PROMPT_TOKENS`` is the engine child; it prints ``first-token SECONDS``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from belayer.clock import monotonic
from belayer.localhost import free_port

_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment(tmp: str) -> dict[str, str]:
    """``tmp``: a killed vLLM leaves sockets and rendezvous files; they go with the folder."""
    return {**os.environ, **_ENV, "TMPDIR": tmp, "VLLM_RPC_BASE_PATH": tmp}


def engine_seconds(model: Path, prompt_tokens: int = 400) -> float:
    """Seconds from starting a process to its first token. Raises CalledProcessError when it fails."""
    began = monotonic()
    command = [sys.executable, "-m", "benchmarks.cold", str(model), str(prompt_tokens)]
    with tempfile.TemporaryDirectory(prefix="cold-") as tmp:
        done = subprocess.run(command, env=environment(tmp), check=True, capture_output=True, text=True)
    took = monotonic() - began
    if "first-token" not in done.stdout:
        raise RuntimeError(f"the cold engine made no token: {done.stdout[-400:]} {done.stderr[-400:]}")
    return took


def server_seconds(model: Path, prompt_tokens: int = 400, within: float = 300.0) -> float:
    """Seconds from starting vLLM's own API server to the first token over HTTP."""
    port, began = free_port(), monotonic()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    body = json.dumps({"model": str(model), "prompt": [100] * prompt_tokens, "max_tokens": 1}).encode()
    with tempfile.TemporaryDirectory(prefix="cold-") as tmp:
        env = {key: value for key, value in environment(tmp).items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        child = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _first_answer(f"http://127.0.0.1:{port}/v1/completions", body, child, began + within)
            return monotonic() - began
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(30)


def _first_answer(url: str, body: bytes, child: subprocess.Popen[bytes], deadline: float) -> None:
    pause = threading.Event()
    while monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"vLLM's server ended with {child.returncode}")
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                if json.load(reply)["choices"]:
                    return
        except (urllib.error.URLError, ConnectionError):
            pause.wait(0.05)
    raise RuntimeError("vLLM's server gave no token in time")


def _child(model: str, prompt_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    args = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=128 << 20,
        distributed_executor_backend="uni",
    )
    config = args.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    request = EngineCoreRequest(
        request_id="cold",
        prompt_token_ids=[100] * prompt_tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    core.add_request(*core.preprocess_add_request(request))
    while True:
        outputs, _ = core.step()
        tokens = [token for out in outputs.values() for row in out.outputs for token in row.new_token_ids]
        if tokens:
            print("first-token", tokens[0], flush=True)
            return


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
