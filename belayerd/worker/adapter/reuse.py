"""KV that a killed main had finished, found again by the next one (``[slot] kv_reuse``).

vLLM enters a block in its prefix cache while it *schedules* the step that will write it. So the hook below only notes
the block, and ``after_step`` publishes it once the step has returned: the worker steps synchronously (checked), on the
CPU the forward pass has then written, on a GPU the sampled tokens have come back behind it on the same stream.
Blocks leave the log before vLLM can hand them out again, because vLLM drops their hashes first.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from belayer.errors import HostUnfit
from belayerd.worker.adapter.checks import VLLM
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.seat import seat
from belayerd.worker.blocklog import BlockLog, Entry


class LoggedPool(BlockPool):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's block pool, which tells ``reuse`` what enters and leaves the prefix cache."""

    reuse: Reuse

    def _insert_block_hash(
        self, block_hash_with_group_id: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        self.reuse.entered(block)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> Any:
        self.reuse.left(block)
        return super()._remove_cached_block_hashes(block)

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        if done:
            self.reuse.emptied()
        return done


class Reuse:
    """Keeps ``log`` for ``core``'s block pool, once ``adopt`` has been called."""

    pool_class: type[LoggedPool] = LoggedPool

    def __init__(self, core: Core, view: Any) -> None:
        if core.batch_queue is not None:
            raise HostUnfit(
                "kv_reuse needs steps that end before the next is scheduled, this engine queues batches",
                remedy="kv_reuse = false for this slot",
            )
        self._pool: LoggedPool = core.scheduler.kv_cache_manager.block_pool
        self.log = BlockLog(view, self._pool.num_gpu_blocks, fingerprint(core))
        self._fresh: dict[int, KVCacheBlock] = {}
        # The pool exists by now and others hold it: the same object gets the class that also tells us.
        self._pool.__class__ = self.pool_class
        self._pool.reuse = self

    def adopt(self, epoch: int) -> int:
        """After the prefix cache was emptied under the lease of ``epoch``: enter what the last main had finished;
        returns the number of blocks. From here on the log is kept."""
        self._fresh.clear()
        entries = self.log.open(epoch, _weights())
        taken = 0
        # The free queue is in the order of eviction: the ends of long prefixes go first, as vLLM itself frees them.
        for entry in sorted(entries, key=lambda entry: -entry.tokens):
            taken += self._enter(entry)
        self._fresh.clear()
        return taken

    def _enter(self, entry: Entry) -> bool:
        block = self._pool.blocks[entry.block]
        if block.is_null or block.ref_cnt or block.block_hash is not None:
            self.log.invalidate(entry.block)  # in use already: its content is no longer what the log says
            return False
        BlockPool._insert_block_hash(self._pool, BlockHashWithGroupId(entry.key), block, entry.tokens)
        self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.append(block)
        return True

    def entered(self, block: KVCacheBlock) -> None:
        if self.log.active:
            self._fresh[block.block_id] = block

    def left(self, block: KVCacheBlock) -> None:
        if self.log.active:
            self._fresh.pop(block.block_id, None)
            self.log.invalidate(block.block_id)

    def emptied(self) -> None:
        if self.log.active:
            self._fresh.clear()
            self.log.clear()

    def after_step(self) -> None:
        """The blocks that the step filled are whole now."""
        if not self._fresh:
            return
        weights = _weights()
        for block in self._fresh.values():
            if block.block_hash is not None:
                self.log.publish(Entry(block.block_id, block.block_hash, block.block_hash_num_tokens or 0), weights)
        self._fresh.clear()


def _weights() -> int:
    """Version and digest of the weights that compute now, in 64 bits: KV of others is never taken up."""
    grant = seat().weights.grant
    return int.from_bytes(hashlib.sha256(f"{grant.version} {grant.digest}".encode()).digest()[:8], "little")


def fingerprint(core: Core) -> bytes:
    """Everything but the weights that gives the arena's bytes and the hashes their meaning: 32 bytes."""
    config, manager = core.vllm_config, core.scheduler.kv_cache_manager
    what = [
        VLLM,
        config.model_config.model,
        str(config.model_config.dtype),
        config.model_config.max_model_len,
        config.cache_config.prefix_caching_hash_algo,
        config.cache_config.block_size,
        str(config.cache_config.cache_dtype),
        manager.block_pool.num_gpu_blocks,
        manager.block_pool.hash_block_size,
        [str(group) for group in core.scheduler.kv_cache_config.kv_cache_groups],
        bytes(kv_cache_utils.NONE_HASH),
    ]
    return hashlib.sha256(msgspec.msgpack.encode(what)).digest()
