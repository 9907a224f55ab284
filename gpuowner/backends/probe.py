"""The small kernel in a warm context: does this device still compute, for this process (paper section 3.2).

Made while the standby warms up, so that a check costs one launch and one small copy.
"""

from __future__ import annotations

from belayer.bounded import bounded
from belayer.clock import Stopwatch
from belayer.errors import GpuUnhealthy
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError, Kernel, probe_word
from gpuowner.backends.port import Access

_WORDS = 4096
_CHECKED = (0, 1, 31, 32, 1023, 1024, 4095)  # across lanes, warps and blocks


class WarmProbe:
    """``probe()`` returns milliseconds. Raises GpuUnhealthy: a wrong word, an error of the driver, or no answer within
    ``deadline_s``. After no answer the process must end: its thread is still inside the driver."""

    def __init__(self, memory: CudaVmm) -> None:
        self._memory, self._seed = memory, 0
        grain = memory.granularity()
        self._va = memory.reserve(grain)
        handle = memory.private(grain)
        memory.map_handle(self._va, grain, handle, grain, Access.READ_WRITE)
        memory.release(handle)
        self.probe(deadline_s=60.0)  # the first launch loads and compiles the kernels

    def probe(self, deadline_s: float = 2.0) -> float:
        watch = Stopwatch()
        self._seed += 1  # a stale answer of an earlier probe never fits
        try:
            words = bounded(self._run, deadline_s, "probe kernel")
        except TimeoutError as why:
            raise GpuUnhealthy(f"probe: {why}", remedy="end this worker, then check the device") from why
        except DriverError as why:
            raise GpuUnhealthy(f"probe: {why.message}", remedy="end this worker, then check the device") from why
        wrong = [at for at in _CHECKED if words[at] != probe_word(self._seed, at)]
        if wrong:
            raise GpuUnhealthy(f"probe: wrong words at {wrong}", remedy="the device computes wrongly: take it out")
        return watch.ms()

    def _run(self) -> list[int]:
        self._memory.launch(Kernel.PROBE, _WORDS // 256, 256, self._va, _WORDS, self._seed)
        return self._memory.read_words(self._va, _WORDS)
