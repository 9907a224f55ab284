// A stand-in for libcuda.so.1, so that the code which calls cuda.bindings runs on a machine without a GPU: every argument
// goes through the real bindings' conversions and struct layouts. Memory is memfds; kernels are kernels.cu, run as C++.
// Where cuda.h says that a call fails, it fails. Built by tests/contract/test_cuda_driver.py.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <map>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct Dim { unsigned long long x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static unsigned long long atomicAdd(unsigned long long *at, unsigned long long v) { auto old = *at; *at += v; return old; }
static unsigned long long host_nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ULL + t.tv_nsec;
}
#define __global__
#include "kernels.cu"
#undef __global__

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, NOT_FOUND = 500 };
struct Location { int type, id; };
struct Prop { int type, handle_types; Location location; void *win32; unsigned char flags[8]; };
struct Access { Location location; int flags; };


static const size_t GRAIN = 2 << 20;
static bool initialised, primary;
static thread_local bool current;
static std::map<uint64_t, std::pair<int, size_t>> handles;
static std::map<uint64_t, size_t> reserved, mapped;
static uint64_t next_handle = 0x1000;
static std::string image;

#define NEED_INIT if (!initialised) return NOT_INITIALIZED
#define NEED_CONTEXT NEED_INIT; if (!current) return INVALID_CONTEXT
#define CU extern "C" __attribute__((visibility("default"))) int

CU cuInit(unsigned flags) { if (flags) return INVALID_VALUE; initialised = true; return OK; }
CU cuDeviceGetCount(int *n) { NEED_INIT; *n = 1; return OK; }
CU cuDeviceGet(int *dev, int ordinal) { NEED_INIT; if (ordinal) return INVALID_DEVICE; *dev = 0; return OK; }
CU cuDeviceGetUuid_v2(unsigned char *uuid, int) { NEED_INIT; for (int i = 0; i < 16; i++) uuid[i] = 0xA0 + i; return OK; }
CU cuDevicePrimaryCtxRetain(void **ctx, int) { NEED_INIT; *ctx = &primary; primary = true; return OK; }
CU cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) { NEED_INIT; *flags = 0; *active = primary; return OK; }
CU cuCtxSetCurrent(void *ctx) { NEED_INIT; if (ctx != &primary) return INVALID_CONTEXT; current = true; return OK; }
CU cuCtxSynchronize() { NEED_CONTEXT; return OK; }

static bool wrong(const Prop *p) { return p->type != 1 || p->handle_types != 1 || p->location.type != 1 || p->location.id; }
CU cuMemGetAllocationGranularity(size_t *out, const Prop *p, int option) {
    NEED_INIT; if (wrong(p) || option) return INVALID_VALUE; *out = GRAIN; return OK;
}
CU cuMemCreate(uint64_t *handle, size_t size, const Prop *p, uint64_t flags) {
    NEED_INIT; if (wrong(p) || flags || !size || size % GRAIN) return INVALID_VALUE;
    int fd = memfd_create("standin-libcuda", 0);  // inheritable, as the real one is
    if (fd < 0 || ftruncate(fd, size)) return NO_MEMORY;
    *handle = next_handle++;
    handles[*handle] = {fd, size};
    return OK;
}
CU cuMemRelease(uint64_t h) {
    if (!handles.count(h)) return INVALID_VALUE; close(handles[h].first); handles.erase(h); return OK;
}
CU cuMemExportToShareableHandle(void *out, uint64_t h, int type, uint64_t flags) {
    if (!handles.count(h) || type != 1 || flags) return INVALID_VALUE; *(int *)out = dup(handles[h].first); return OK;
}
CU cuMemImportFromShareableHandle(uint64_t *h, void *os, int type) {
    NEED_INIT; if (type != 1) return INVALID_VALUE;
    int fd = (int)(intptr_t)os;
    char name[256] = "", path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 || !strstr(name, "standin-libcuda")) return INVALID_VALUE;
    struct stat s;
    if (fstat(fd, &s)) return INVALID_VALUE;
    *h = next_handle++;
    handles[*h] = {dup(fd), (size_t)s.st_size};
    return OK;
}
CU cuMemAddressReserve(uint64_t *va, size_t size, size_t align, uint64_t at, uint64_t flags) {
    NEED_INIT; if (!size || size % GRAIN || at || flags) return INVALID_VALUE;
    if (!align) align = GRAIN;
    uint64_t whole = (uint64_t)mmap(nullptr, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *va = (whole + align - 1) / align * align;
    if (*va > whole) munmap((void *)whole, *va - whole);
    if (whole + align > *va) munmap((void *)(*va + size), whole + align - *va);
    reserved[*va] = size;
    return OK;
}
CU cuMemAddressFree(uint64_t va, size_t size) {
    auto r = reserved.find(va);
    if (r == reserved.end() || r->second != size) return INVALID_VALUE;
    for (auto &m : mapped) if (m.first >= va && m.first < va + size) return INVALID_VALUE;
    munmap((void *)va, size);
    reserved.erase(r);
    return OK;
}
CU cuMemMap(uint64_t va, size_t size, size_t offset, uint64_t h, uint64_t flags) {
    NEED_INIT; if (offset || flags || !handles.count(h) || !size || size % GRAIN || size > handles[h].second) return INVALID_VALUE;
    bool home = false;
    for (auto &r : reserved) home |= r.first <= va && va + size <= r.first + r.second;
    for (auto &m : mapped) if (m.first < va + size && va < m.first + m.second) return INVALID_VALUE;
    if (!home) return INVALID_VALUE;
    if (mmap((void *)va, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[h].first, 0) == MAP_FAILED) return NO_MEMORY;
    mapped[va] = size;
    return OK;
}
static bool exact(uint64_t va, size_t size) { return mapped.count(va) && mapped[va] == size; }
CU cuMemUnmap(uint64_t va, size_t size) {
    if (!exact(va, size)) return INVALID_VALUE;
    mmap((void *)va, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    mapped.erase(va);
    return OK;
}
CU cuMemSetAccess(uint64_t va, size_t size, const Access *desc, size_t count) {
    if (!exact(va, size) || count != 1 || desc->location.type != 1 || desc->location.id) return INVALID_VALUE;
    int prot = desc->flags == 3 ? PROT_READ | PROT_WRITE : desc->flags == 1 ? PROT_READ : desc->flags == 0 ? PROT_NONE : -1;
    if (prot < 0) return INVALID_VALUE;
    return mprotect((void *)va, size, prot) ? INVALID_VALUE : OK;
}
CU cuMemsetD8_v2(uint64_t va, unsigned char value, size_t n) { NEED_CONTEXT; memset((void *)va, value, n); return OK; }
CU cuMemcpyDtoH_v2(void *host, uint64_t va, size_t n) { NEED_CONTEXT; memcpy(host, (void *)va, n); return OK; }
CU cuMemcpyHtoD_v2(uint64_t va, const void *host, size_t n) { NEED_CONTEXT; memcpy((void *)va, host, n); return OK; }
CU cuMemcpyDtoD_v2(uint64_t to, uint64_t va, size_t n) { NEED_CONTEXT; memcpy((void *)to, (void *)va, n); return OK; }

CU cuModuleLoadData(void **module, const void *data) {
    NEED_CONTEXT; image = (const char *)data;
    if (image.find(".version") == std::string::npos) return INVALID_IMAGE;
    *module = &image;
    return OK;
}
typedef void (*Body)(uint64_t *);
static void digest(uint64_t *a) { belayer_digest(a[0], a[1], a[2]); }
static void probe(uint64_t *a) { belayer_probe(a[0], a[1], a[2]); }
static void poke(uint64_t *a) { belayer_poke(a[0], a[1]); }
static void spin(uint64_t *a) { belayer_spin(a[0]); }
struct Function { const char *name; int count; Body body; };
static Function functions[] = {
    {"belayer_digest", 3, digest}, {"belayer_probe", 3, probe}, {"belayer_poke", 2, poke}, {"belayer_spin", 1, spin}};
CU cuModuleGetFunction(void **out, void *module, const char *name) {
    NEED_CONTEXT; if (module != &image || image.find(std::string(".entry ") + name + "(") == std::string::npos) return NOT_FOUND;
    for (auto &f : functions) if (!strcmp(f.name, name)) { *out = &f; return OK; }
    return NOT_FOUND;
}
CU cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  void *stream, void **params, void **extra) {
    NEED_CONTEXT; if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || stream || extra) return INVALID_VALUE;
    Function *function = (Function *)f;
    uint64_t args[3];
    for (int i = 0; i < function->count; i++) args[i] = *(uint64_t *)params[i];
    gridDim.x = gx, blockDim.x = bx;
    bool once = !strcmp(function->name, "belayer_spin");
    for (blockIdx.x = 0; blockIdx.x < (once ? 1 : gx); blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < (once ? 1 : bx); threadIdx.x++) function->body(args);
    return OK;
}
#include <dlfcn.h>
CU cuGetProcAddress_v2(const char *name, void **out, int, uint64_t, int *status) {
    *out = nullptr;
    for (const char *suffix : {"", "_v2"}) {
        *out = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str());
        if (!*out) {
            void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
            if (self) *out = dlsym(self, (std::string(name) + suffix).c_str());
        }
        if (*out) break;
    }
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
CU cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) { return cuGetProcAddress_v2(name, out, version, flags, nullptr); }
