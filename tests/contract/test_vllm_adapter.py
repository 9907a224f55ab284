"""The hooks into vLLM fail closed: each names what does not fit instead of quietly not hooking."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch")

from pydantic import BaseModel, ValidationError, model_validator  # noqa: E402
from torch import nn  # noqa: E402
from vllm.model_executor.model_loader import utils as loading  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.sample import logits_processor  # noqa: E402

from belayer.errors import BelayerError, HostUnfit, WeightsBroken  # noqa: E402
from belayer.messages.owner import TensorSpec  # noqa: E402
from belayerd import vllm_words  # noqa: E402
from belayerd.worker.adapter import shortcuts  # noqa: E402
from belayerd.worker.adapter.arena import BelayerWorker, _AnswerZeros  # noqa: E402
from belayerd.worker.adapter.checks import self_check  # noqa: E402
from belayerd.worker.adapter.resume import Draws, ResumingRunner  # noqa: E402
from belayerd.worker.adapter.weights import assert_inside, bind  # noqa: E402
from gpuowner.backends.memfd import Memfd  # noqa: E402
from gpuowner.vmem import Mapping  # noqa: E402

SIZE = 1 << 16
CORE = "vllm.v1.engine.core"


def test_every_hook_fits_the_installed_vllm() -> None:
    self_check()


def test_a_start_leaves_out_what_no_worker_needs() -> None:
    """A third of a second of CPU in which a slot is exposed: notes for a reload, a search through all packages, and a
    second runner."""
    found = logits_processor._load_logitsprocs_plugins()
    for _ in range(2):
        shortcuts.prepare()
    model = nn.Linear(2, 2)
    loading.record_metadata_for_reloading(model)
    assert model not in LAYERWISE_INFO
    once = logits_processor._load_logitsprocs_plugins()
    assert once == found
    once.append(object)
    assert logits_processor._load_logitsprocs_plugins() == found, "each caller has a list of its own"
    init = inspect.getclosurevars(inspect.unwrap(BelayerWorker.__mro__[1].init_device))
    assert init.globals["CPUModelRunner"] is ResumingRunner, "the one that vLLM's worker makes"


@pytest.mark.parametrize(
    ("hooked", "fields", "named"),
    [
        (((CORE, "EngineCore.no_such_method", None),), (), "no_such_method is gone"),
        ((("vllm.no_such_module", "x", None),), (), r"vllm\.no_such_module\.x is gone"),
        (((CORE, "EngineCore.add_request", ("request", "no_such_parameter")),), (), "no parameter 'no_such_parameter'"),
        ((), (("vllm.v1.engine", "EngineCoreOutput", ("no_such_field",)),), "no field 'no_such_field'"),
    ],
)
def test_a_hook_that_does_not_fit_is_named(hooked: object, fields: object, named: str) -> None:
    with pytest.raises(HostUnfit, match=named):
        self_check(hooked, fields)  # type: ignore[arg-type]


class View:
    """What ``bind`` reads of a WeightsView: a mapping, a layout and a grant."""

    class grant:
        model = "m"

    def __init__(self, mapping: Mapping, specs: list[TensorSpec]) -> None:
        self.mapping = mapping
        self.tensors = {spec.name: spec for spec in specs}


@pytest.fixture
def mapping() -> Mapping:
    return Memfd("test", SIZE).map_writable()


def spec(shape: tuple[int, ...] = (4, 4), dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name="weight", dtype=dtype, shape=shape, offset=64, nbytes=64)


def test_parameters_become_views_and_a_copy_is_noticed(mapping: Mapping) -> None:
    layer, view = nn.Linear(4, 4, bias=False), View(mapping, [spec()])
    with pytest.raises(WeightsBroken, match="private copy"):
        assert_inside(layer, view)
    bind(layer, view)
    assert_inside(layer, view)
    mapping.buffer()[64:128] = b"\0" * 64
    assert torch.count_nonzero(layer.weight) == 0
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # what packing leaves behind
    with pytest.raises(WeightsBroken, match="private copy"):
        assert_inside(layer, view)


@pytest.mark.parametrize(
    ("specs", "named"),
    [([], "do not hold"), ([spec((2, 8))], "the engine wants"), ([spec(dtype="F16")], "the engine wants")],
)
def test_a_layout_that_does_not_fit_the_engine_is_refused(
    mapping: Mapping, specs: list[TensorSpec], named: str
) -> None:
    with pytest.raises(WeightsBroken, match=named):
        bind(nn.Linear(4, 4, bias=False), View(mapping, specs))


def test_the_cache_lies_in_the_arena_or_there_is_no_engine(mapping: Mapping) -> None:
    with _AnswerZeros(mapping):
        other = torch.zeros(8)
        cache = torch.zeros(4096, dtype=torch.int8, device="cpu")
    assert cache.data_ptr() == mapping.address
    assert not mapping.contains(other.data_ptr(), 1)
    with pytest.raises(BelayerError, match="arena was not used"), _AnswerZeros(mapping):
        torch.zeros(8)
    with pytest.raises(BelayerError, match="asks for"), _AnswerZeros(mapping):
        torch.zeros(SIZE + 1, dtype=torch.int8)
    with _AnswerZeros(mapping):
        torch.zeros(8, dtype=torch.int8)
        with pytest.raises(BelayerError, match="asks for"):
            torch.zeros(8, dtype=torch.int8)


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))


def test_draws_are_those_of_the_stock_generator_at_every_position() -> None:
    stock = torch.Generator().manual_seed(9)
    expected = [draw(stock) for _ in range(50)]
    for start in (0, 1, 49):
        draws = Draws(9)
        got = []
        for position in range(start, 50):
            draws.step_to(position)
            got.append(draw(draws))
        assert got == expected[start:]
    draws = Draws(9)
    draws.step_to(0)
    draw(draws)  # a chunk of a long prefill draws and throws away; vLLM then wants it taken back
    draws.set_offset(draws.get_offset() - 4)
    draws.step_to(0)
    assert draw(draws) == expected[0]


def test_too_little_kv_is_told_by_the_keys_of_ours() -> None:
    """By vLLM's own check, whatever its words are; any other ValueError stays what it is."""
    check = getattr(kv_cache_utils, vllm_words.KV_CHECK)
    for available in (0, 5 << 20):
        with pytest.raises(ValueError, match="gpu_memory_utilization") as caught:
            check(available, lambda: 1 << 30, 4096, lambda have: 16)
        said = str(vllm_words.too_little_kv(caught.value, 5 << 20, 4096))
        assert said.startswith("slot.kv_bytes = 5242880 is too little for one request of slot.max_model_len = 4096")
        assert said.endswith("; raise slot.kv_bytes, or lower slot.max_model_len")
        assert "gpu_memory" not in said
        assert "http" not in said
    assert "maximum model length is 16" in said
    assert vllm_words.too_little_kv(ValueError("available KV cache memory"), 1, 1) is None


def test_a_model_that_vllm_refuses_is_told_with_the_whole_reason_and_our_key() -> None:
    class Shape(BaseModel):
        length: int

        @model_validator(mode="after")
        def refused(self) -> Shape:
            raise ValueError(
                f"User-specified max_model_len ({self.length})\nis greater than the derived max_model_len (n=2). "
                "To allow overriding this maximum, set the env var VLLM_ALLOW"
            )

    with pytest.raises(ValidationError) as caught:
        Shape(length=9)
    why = vllm_words.reason(caught.value)
    assert why == "User-specified max_model_len (9) is greater than the derived max_model_len (n=2)"
    assert vllm_words.remedy(caught.value) == "lower slot.max_model_len"
    assert (vllm_words.reason(KeyError()), vllm_words.remedy(KeyError())) == ("KeyError", "")
