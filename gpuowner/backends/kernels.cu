// The four small kernels of the cuda_vmm backend. Each argument is an unsigned 64-bit integer, so that the launch needs no
// types. kernels.ptx is made from this file (docs/h200.md says how); tests compile this file as C++ for the CPU and compare
// it with the NumPy twin, and assemble the PTX where an assembler is installed.
typedef unsigned long long u64;

// Sums of one chunk: out[0] += sum of words, out[1] += sum of (position + 1) * word. Integer sums are exact in any order.
extern "C" __global__ void belayer_digest(u64 words, u64 count, u64 out) {
    const u64 *in = (const u64 *)words;
    u64 *sums = (u64 *)out;
    u64 plain = 0, weighted = 0;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u64 word = in[i];
        plain += word;
        weighted += word * (i + 1);
    }
#ifdef __CUDA_ARCH__
    // One atomic per warp instead of one per thread: they all meet at the same two addresses.
    for (int far = 16; far > 0; far /= 2) {
        plain += __shfl_down_sync(0xffffffffu, plain, far);
        weighted += __shfl_down_sync(0xffffffffu, weighted, far);
    }
    if (threadIdx.x % 32) return;
#endif
    atomicAdd(sums, plain);
    atomicAdd(sums + 1, weighted);
}

// Health: something to compute that a broken unit would get wrong.
extern "C" __global__ void belayer_probe(u64 out, u64 count, u64 seed) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        u64 x = seed + i;
        for (int round = 0; round < 64; round++) x = x * 6364136223846793005ULL + 1442695040888963407ULL;
        ((u64 *)out)[i] = x;
    }
}

// Fault injection: a store to any address.
extern "C" __global__ void belayer_poke(u64 address, u64 value) { *(volatile u64 *)address = value; }

// Fault injection: a busy GPU for at most five seconds; an endless kernel would cost the card (gpu-wide faults).
extern "C" __global__ void belayer_spin(u64 nanoseconds) {
    u64 limit = nanoseconds < 5000000000ULL ? nanoseconds : 5000000000ULL, start, now;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < limit);
#else
    start = host_nanoseconds();
    do { now = host_nanoseconds(); } while (now - start < limit);
#endif
}
