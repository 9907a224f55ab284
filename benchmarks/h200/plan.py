"""What one run does: the model's shape, sizes, repetitions, and a deadline for each stage. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

GRAIN = 2 << 20  # bytes; sizes of allocations are multiples
CHUNK = 64 << 20  # bytes of scratch that a standby's KV addresses lead to


@dataclass(frozen=True)
class Shape:
    """A decoder in the form of Qwen3. ``batch`` streams decode together; ``max_len`` positions each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    batch: int
    max_len: int
    dtype: str

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in the order of the arena."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: list[tuple[str, tuple[int, ...]]] = [("embed", (self.vocab, self.hidden))]
        for at in range(self.layers):
            out += [
                (f"{at}.norm1", (self.hidden,)),
                (f"{at}.qkv", (q + 2 * kv, self.hidden)),
                (f"{at}.qnorm", (self.head_dim,)),
                (f"{at}.knorm", (self.head_dim,)),
                (f"{at}.out", (self.hidden, q)),
                (f"{at}.norm2", (self.hidden,)),
                (f"{at}.gate_up", (2 * self.inter, self.hidden)),
                (f"{at}.down", (self.hidden, self.inter)),
            ]
        return [*out, ("norm", (self.hidden,)), ("head", (self.vocab, self.hidden))]

    def item(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    def layout(self) -> tuple[list[tuple[str, tuple[int, ...], int]], int]:
        """(name, shape, byte offset) of each parameter, and the size of the arena in whole granules."""
        rows, at = [], 0
        for name, shape in self.tensors():
            at = -(-at // 256) * 256
            rows.append((name, shape, at))
            count = 1
            for length in shape:
                count *= length
            at += count * self.item()
        return rows, -(-at // GRAIN) * GRAIN

    def kv_bytes(self) -> int:
        """Of what the decoder uses; the arena may be larger."""
        return self.layers * 2 * self.batch * self.max_len * self.kv_heads * self.head_dim * self.item()


@dataclass(frozen=True)
class Plan:
    """``tokens``: of the unfailed run that others are compared with; ``fault_at``, ``after``: tokens of a stream before
    a fault and after it. ``model_bytes``: of the model that gpuowner itself loads (W1). ``faults``: kind -> how often.
    ``hang_s``: silence that counts as a hang. ``model``: a Hugging Face folder for vLLM's engine (S7)."""

    fake: bool
    shape: Shape
    arena_bytes: int
    prompt: int
    tokens: int
    fault_at: int
    after: int
    faults: dict[str, int]
    baselines: int
    overhead_s: float
    lifetime_bytes: int
    model_bytes: int
    hang_s: float
    deadlines: dict[str, float]
    total_s: float
    model: Path | None = None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "model": str(self.model or "")}


SHAPES = {
    "8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, 8, 1024, "bfloat16"),
    "4b": Shape(36, 2560, 32, 8, 128, 9728, 151936, 8, 1024, "bfloat16"),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 512, 2, 96, "float32"),
}
STAGES = ("S0", "T1", "S1", "S2", "S3", "S4", "S5", "S6", "W1", "S7")


def real(shape: str, kv_gb: float) -> Plan:
    """For one H200: about 330 s are planned, 400 are the limit."""
    chosen = SHAPES[shape]
    arena = max(int(kv_gb * 1e9), chosen.kv_bytes())
    return Plan(
        fake=False,
        shape=chosen,
        arena_bytes=-(-arena // CHUNK) * CHUNK,
        prompt=16,
        tokens=64,
        fault_at=32,
        after=16,
        faults={"kill": 5, "assert": 2, "illegal": 2, "stop": 2, "busy": 1, "oom": 1},
        baselines=3,
        overhead_s=5.0,
        lifetime_bytes=2 << 30,
        model_bytes=2 << 30,
        hang_s=1.0,
        deadlines=dict(zip(STAGES, (15, 40, 60, 60, 60, 160, 120, 60, 90, 300), strict=True)),
        total_s=395.0,
    )


def fake() -> Plan:
    """The same on a CPU in well under a minute; deadlines are wide, since test machines are crowded."""
    shape = SHAPES["tiny"]
    return Plan(
        fake=True,
        shape=shape,
        arena_bytes=4 * GRAIN,
        prompt=4,
        tokens=24,
        fault_at=8,
        after=6,
        faults={"kill": 1, "assert": 1, "illegal": 1, "stop": 1, "busy": 1, "oom": 1},
        baselines=1,
        overhead_s=0.3,
        lifetime_bytes=2 * GRAIN,
        model_bytes=CHUNK + GRAIN,
        hang_s=1.0,
        deadlines=dict.fromkeys(STAGES, 120.0),
        total_s=400.0,
    )


def named(name: str) -> Plan:
    """``fake``, or ``SHAPE:KV_GB``: how a process of the run is told its plan."""
    if name == "fake":
        return fake()
    shape, _, kv_gb = name.partition(":")
    return real(shape, float(kv_gb))


def prompts(plan: Plan) -> list[list[int]]:
    """``prompt`` tokens for each of ``batch`` streams, token by token: [position][stream]."""
    shape = plan.shape
    return [[(97 * at + 31 * row + 7) % shape.vocab for row in range(shape.batch)] for at in range(plan.prompt)]
