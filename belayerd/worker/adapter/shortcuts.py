"""What vLLM does in every engine's start and what is the same, or of no use, in each of ours: put in once before the
fork, because a worker spends it while its slot is exposed. A tenth of a second of CPU and more, each (SmolLM2-135M)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import utils as loading
from vllm.v1.sample import logits_processor


def _no_record(model: Any) -> None:
    """vLLM notes of every layer what a reload into it would need. Here nothing is loaded into layers: they look at the
    owner's memory, and ``OwnerLoader.load_weights`` refuses."""


def prepare() -> None:
    """In the zygote. Idempotent."""
    if loading.record_metadata_for_reloading is _no_record:
        return
    loading.record_metadata_for_reloading = _no_record
    # Found by reading the metadata of every installed package.
    plugins = logits_processor._load_logitsprocs_plugins()
    logits_processor._load_logitsprocs_plugins = lambda: list(plugins)
