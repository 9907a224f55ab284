/*
 * A plugin for CRIU's restore: takes POSIX record locks again.
 *
 * CRIU takes them first and then closes the descriptor through which it maps a file: by fcntl(2) that drops every lock of
 * the process on that file (SQLite in WAL mode holds such locks). When the late hook runs, every task is whole, stopped
 * by CRIU at the end of rt_sigreturn and has run no instruction of its own; CRIU is the tracer, and so are we: each
 * recorded lock is taken by the process itself, by an injected fcntl(2). A lock that is there already is taken again,
 * which changes nothing. How many were taken is written beside the images as "relocked"; envkeeper compares it with what
 * was recorded. A process whose lock cannot be taken is killed: it must not run without it.
 *
 * No libc of its own: its few functions are those of CRIU's. x86-64 only; elsewhere envkeeper refuses such a sandbox.
 * Format of the descriptor and of the image: CRIU's criu-plugin.h and images/file-lock.proto.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define GETSIGMASK 0x420a
#define SETSIGMASK 0x420b
#define POSIX_LOCK 1
#define LATE 9
#define HOOKS 10                        /* up to the one that we take: later versions of CRIU know more */
#define MOST (1 << 20)

extern int criu_get_image_dir(void);

struct lock { uint64_t field[7]; };     /* flag, type, pid, fd, start, len at 1..6 */
struct place { unsigned long call, scratch; };
struct kernel_flock { int16_t type, whence; int64_t start, len; int32_t pid; };

static int taken;

static void note(const char *text) {
    int fd = openat(criu_get_image_dir(), "relocked", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return;
    ssize_t done = write(fd, text, strlen(text));
    (void)done;
    close(fd);
}

/* One message of varints; 0 when it is none. */
static int decode(const unsigned char *data, size_t size, struct lock *out) {
    memset(out, 0, sizeof *out);
    for (size_t at = 0; at < size;) {
        unsigned key = data[at++], shift = 0;
        uint64_t value = 0;
        if ((key & 7) != 0 || key >> 3 < 1 || key >> 3 > 6) return 0;
        do {
            if (at >= size || shift > 63) return 0;
            value |= (uint64_t)(data[at] & 127) << shift;
            shift += 7;
        } while (data[at++] & 128);
        out->field[key >> 3] = value;
    }
    return 1;
}

static int pid_inside(int pid) {
    char path[64], line[256];
    int found = -1;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "NSpid:", 6) == 0) found = atoi(strrchr(line, '\t') + 1);
    if (file) fclose(file);
    return found;
}

/* A system call instruction (the vdso has some) and 32 writable bytes, which are put back. */
static int find(int pid, struct place *out) {
    char path[64], line[512], mode[8];
    unsigned long from, to;
    memset(out, 0, sizeof *out);
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "re");
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int mem = open(path, O_RDONLY | O_CLOEXEC);
    while (file && mem >= 0 && fgets(line, sizeof line, file)) {
        unsigned char code[16384], probe[32];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3) continue;
        if (!out->scratch && strcmp(mode, "rw-p") == 0 && pread(mem, probe, 32, (off_t)from) == 32) out->scratch = from;
        if (!strstr(line, "[vdso]")) continue;
        ssize_t n = pread(mem, code, to - from < sizeof code ? to - from : sizeof code, (off_t)from);
        for (ssize_t i = 0; i + 1 < n && !out->call; i++)
            if (code[i] == 0x0f && code[i + 1] == 0x05) out->call = from + i;
    }
    if (file) fclose(file);
    if (mem >= 0) close(mem);
    return out->call && out->scratch;
}

static int trap(int pid) {
    int status;
    if (ptrace(PTRACE_SYSCALL, pid, NULL, NULL)) return 0;
    if (waitpid(pid, &status, __WALL) != pid || !WIFSTOPPED(status)) return 0;
    return (WSTOPSIG(status) & 127) == SIGTRAP;
}

/* What fcntl(fd, F_SETLK, lock) answers in the stopped task; its registers, mask and memory are as before. */
static long take(int pid, const struct place *at, const struct lock *lock) {
    struct kernel_flock want = { .type = (int16_t)lock->field[2], .whence = SEEK_SET,
                                 .start = (int64_t)lock->field[5], .len = (int64_t)lock->field[6] };
    struct user_regs_struct before, now;
    uint64_t mask, all = ~0ull;
    long saved[4], words[4], answer = -EIO;
    memcpy(words, &want, sizeof words);
    if (ptrace(PTRACE_GETREGS, pid, NULL, &before) || before.cs != 0x33) return -ENOSYS;       /* 32-bit: not ours */
    if (ptrace(GETSIGMASK, pid, (void *)sizeof mask, &mask)) return -EIO;
    for (int i = 0; i < 4; i++) {
        errno = 0;
        saved[i] = ptrace(PTRACE_PEEKDATA, pid, (void *)(at->scratch + 8 * i), NULL);
        if (errno) return -errno;
    }
    now = before;
    now.rip = at->call;
    now.rax = SYS_fcntl;
    now.orig_rax = -1;
    now.rdi = lock->field[4];
    now.rsi = F_SETLK;
    now.rdx = at->scratch;
    int good = !ptrace(SETSIGMASK, pid, (void *)sizeof all, &all) && !ptrace(PTRACE_SETREGS, pid, NULL, &now);
    for (int i = 0; good && i < 4; i++) good = !ptrace(PTRACE_POKEDATA, pid, (void *)(at->scratch + 8 * i), (void *)words[i]);
    if (good && trap(pid) && trap(pid) && !ptrace(PTRACE_GETREGS, pid, NULL, &now)) answer = (long)now.rax;
    for (int i = 0; i < 4; i++)
        if (ptrace(PTRACE_POKEDATA, pid, (void *)(at->scratch + 8 * i), (void *)saved[i])) answer = -EIO;
    if (ptrace(PTRACE_SETREGS, pid, NULL, &before) || ptrace(SETSIGMASK, pid, (void *)sizeof mask, &mask)) answer = -EIO;
    return answer;
}

static unsigned char *image(size_t *size) {
    int fd = openat(criu_get_image_dir(), "filelocks.img", O_RDONLY | O_CLOEXEC);
    unsigned char *data = fd < 0 ? NULL : malloc(MOST);
    ssize_t n = data ? read(fd, data, MOST) : 0;
    if (fd >= 0) close(fd);
    *size = n > 0 ? (size_t)n : 0;
    return data;
}

static int relock(int pid) {
    size_t size;
    unsigned char *data = image(&size);
    struct place at = { 0 };
    char text[160];
    int inside = pid_inside(pid);
    for (size_t next, head = 8; data && head + 4 <= size; head = next) {   /* after two magic words: size, message */
        uint32_t length;
        struct lock lock;
        memcpy(&length, data + head, 4);
        next = head + 4 + length;
        if (next > size || next < head || !decode(data + head + 4, length, &lock)) break;
        if (lock.field[1] != POSIX_LOCK || (int)lock.field[3] != inside) continue;
        long answer = at.call || find(pid, &at) ? take(pid, &at, &lock) : -ENOEXEC;
        if (answer) {
            snprintf(text, sizeof text, "failed: pid %d, descriptor %d: errno %ld\n", inside, (int)lock.field[4], -answer);
            kill(pid, SIGKILL);
            note(text);
            taken = -(1 << 20);
            break;
        }
        snprintf(text, sizeof text, "%d\n", ++taken);
        if (taken > 0) note(text);
    }
    free(data);
    return 0;
}

static int begin(int stage) { (void)stage; return 0; }
static void end(int stage, int result) { (void)stage; (void)result; }

__attribute__((visibility("default"))) struct {
    const char *name;
    int (*init)(int);
    void (*exit)(int, int);
    unsigned version, hooks;
    void *hook[HOOKS];
} CR_PLUGIN_DESC = { "belayer-relock", begin, end, 0 << 16 | 2 << 8 | 0, HOOKS, { [LATE] = (void *)relock } };
