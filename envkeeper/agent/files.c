/*
 * Files in and out of the sandbox. Paths are resolved by the kernel, in our root and without magic links, so that
 * nothing that the sandbox plants (a symlink to /proc/1/fd, a chain of ..) leads anywhere but into its own files.
 */
#include "agent.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define APPEND 1u
#define PART (256u << 10)

static int open_inside(const char *path, uint64_t flags, uint64_t mode) {
    struct open_how how = { .flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };
    if (!(flags & O_PATH)) how.flags |= O_NONBLOCK | O_NOCTTY;      /* a fifo must not hold us up; openat2 is strict */
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = root < 0 ? -1 : (int)syscall(SYS_openat2, root, path, &how, sizeof how);
    int kept = errno;
    if (root >= 0) close(root);
    errno = kept;
    return fd;
}

static void fail(struct conn *c, const char *what, const char *path) {
    char text[512];
    snprintf(text, sizeof text, "%s %.400s: %s", what, path, strerror(errno));
    refuse(c, text);
}

/* The folder of `path`, made where it is missing. `name` is set to the last part. */
static int parent_of(char *path, char **name, uid_t uid, gid_t gid) {
    char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    for (char *at = strchr(path + 1, '/'); slash && at && at <= slash; at = strchr(at + 1, '/')) {
        *at = 0;
        int have = open_inside(path, O_PATH | O_DIRECTORY, 0);
        if (have < 0 && errno == ENOENT) {
            char *last, *cut = strrchr(path, '/');
            int up;
            last = cut ? cut + 1 : path;
            if (cut && cut != path) *cut = 0;
            up = open_inside(cut && cut != path ? path : "/", O_PATH | O_DIRECTORY, 0);
            if (cut && cut != path) *cut = '/';
            if (up >= 0 && mkdirat(up, last, 0755) == 0) (void)!fchownat(up, last, uid, gid, AT_SYMLINK_NOFOLLOW);
            if (up >= 0) close(up);
            have = open_inside(path, O_PATH | O_DIRECTORY, 0);
        }
        *at = '/';
        if (have < 0) return -1;
        close(have);
    }
    if (!slash || slash == path) return open_inside("/", O_PATH | O_DIRECTORY, 0);
    *slash = 0;
    int fd = open_inside(path, O_PATH | O_DIRECTORY, 0);
    *slash = '/';
    return fd;
}

static int write_all(int fd, const uint8_t *data, uint32_t n) {
    for (uint32_t off = 0; off < n;) {
        ssize_t w = write(fd, data + off, n - off);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return -1;
        off += w;
    }
    return 0;
}

/* A new file comes to its name whole, by rename; a symlink of that name is replaced, not followed. */
static int write_new(int up, const char *name, uint32_t mode, uid_t uid, gid_t gid, const uint8_t *data, uint32_t n) {
    char tmp[64];
    snprintf(tmp, sizeof tmp, ".belayer-%d-%llu", getpid(), (unsigned long long)now_ms());
    int fd = openat(up, tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    if (write_all(fd, data, n) || fchown(fd, uid, gid) || fchmod(fd, mode) || renameat(up, tmp, up, name)) {
        int kept = errno;
        close(fd);
        unlinkat(up, tmp, 0);
        errno = kept;
        return -1;
    }
    return close(fd);
}

/* W: u64 action, u32 flags, u32 mode, bytes user, bytes path, bytes data -> k */
void write_file(struct conn *c, const uint8_t *body, size_t n) {
    struct cursor k = { (uint8_t *)body, n, 0 };
    uint64_t number = take_u64(&k);
    uint32_t flags = take_u32(&k), mode = take_u32(&k), len, user_len, path_len;
    char *user = (char *)take_bytes(&k, &user_len), *path = (char *)take_bytes(&k, &path_len), *name;
    uint8_t *data = take_bytes(&k, &len);
    struct who w;
    struct stat st;
    const char *why;
    int up, fd, failed;
    if (k.bad || *path != '/') { refuse(c, "short file request, or no absolute path"); return; }
    if ((why = find_user(user, &w))) { refuse(c, why); return; }
    if ((up = parent_of(path, &name, w.uid, w.gid)) < 0) { fail(c, "no folder for", path); return; }
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) { close(up); refuse(c, "the path names no file"); return; }
    if (flags & APPEND) {
        fd = openat(up, name, O_WRONLY | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        failed = fd < 0 || fstat(fd, &st) || (!S_ISREG(st.st_mode) && (errno = EINVAL)) || write_all(fd, data, len);
        if (fd >= 0) close(fd);
    } else failed = write_new(up, name, mode & 07777, w.uid, w.gid, data, len);
    if (failed) fail(c, "cannot write", path);
    close(up);
    if (failed) return;
    last_done = number;
    frame(c, 'k', "", 0);
    finish(c);
}

/* D: u64 action, u32 mode, bytes user, bytes path -> k. A folder; one that is there already stays as it is. */
void make_folder(struct conn *c, const uint8_t *body, size_t n) {
    struct cursor k = { (uint8_t *)body, n, 0 };
    uint64_t number = take_u64(&k);
    uint32_t mode = take_u32(&k), user_len, path_len;
    char *user = (char *)take_bytes(&k, &user_len), *path = (char *)take_bytes(&k, &path_len), *name;
    struct who w;
    const char *why;
    int up, fd, made, failed;
    if (k.bad || *path != '/') { refuse(c, "short file request, or no absolute path"); return; }
    if ((why = find_user(user, &w))) { refuse(c, why); return; }
    if ((up = parent_of(path, &name, w.uid, w.gid)) < 0) { fail(c, "no folder for", path); return; }
    made = *name && mkdirat(up, name, 0700) == 0;
    if (!made && *name && errno != EEXIST) { fail(c, "cannot make", path); close(up); return; }
    fd = made ? openat(up, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : open_inside(path, O_PATH | O_DIRECTORY, 0);
    failed = fd < 0 || (made && (fchown(fd, w.uid, w.gid) || fchmod(fd, mode & 07777)));
    if (failed) fail(c, "cannot make", path);
    if (fd >= 0) close(fd);
    close(up);
    if (failed) return;
    last_done = number;
    frame(c, 'k', "", 0);
    finish(c);
}

static void send_names(struct conn *c, int fd) {
    DIR *d = fdopendir(fd);
    struct dirent *e;
    if (!d) { close(fd); return; }
    while ((e = readdir(d)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) frame(c, 'd', e->d_name, strlen(e->d_name) + 1);
    closedir(d);
}

/* R: u64 offset, u32 most, bytes path -> d data (a folder: names that end in NUL) ..., z: u64 size, u32 mode */
void read_path(struct conn *c, const uint8_t *body, size_t n) {
    struct cursor k = { (uint8_t *)body, n, 0 };
    static uint8_t part[PART];
    uint64_t offset = take_u64(&k), size;
    uint32_t most = take_u32(&k), len, mode;
    char *path = (char *)take_bytes(&k, &len);
    uint8_t end[12];
    struct stat st;
    ssize_t got = 1;
    int fd;
    if (k.bad || *path != '/') { refuse(c, "short file request, or no absolute path"); return; }
    if ((fd = open_inside(path, O_RDONLY, 0)) < 0 || fstat(fd, &st)) { fail(c, "cannot read", path); return; }
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) { close(fd); refuse(c, "the path is neither a file nor a folder"); return; }
    size = st.st_size; mode = st.st_mode;
    if (S_ISDIR(st.st_mode)) send_names(c, fd);
    else {
        while (most && got > 0) {
            got = pread(fd, part, most < PART ? most : PART, offset);
            if (got < 0) { close(fd); fail(c, "cannot read", path); return; }
            if (got) frame(c, 'd', part, got);
            most -= got; offset += got;
        }
        close(fd);
    }
    memcpy(end, &size, 8); memcpy(end + 8, &mode, 4);
    frame(c, 'z', end, sizeof end);
    finish(c);
}
