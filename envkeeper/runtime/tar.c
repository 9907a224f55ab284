/*
 * Stand-in for tar on CRIU's PATH, for the case that costs most: CRIU runs `tar --gzip` for every tmpfs mount of a
 * container (five of them) inside the freeze, and they hold folders, links and device nodes but no data. Such a folder
 * is written here without starting gzip; one with any file or attribute in it, and every archive that is not ours, goes to
 * the real tar, which is told to keep attributes and nanoseconds.
 *
 * Dump:    tar --create --gzip ... --directory DIR .     -> archive on stdout
 * Restore: tar --extract --gzip ... --directory DIR      <- archive on stdin (a file, so that it can be rewound)
 *
 * The archive is a plain ustar in a plain gzip (stored, not compressed): the real tar reads it as well.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define REAL "/bin/tar"
#define BLOCK 512
#define MAX_TAR (BLOCK * 120)                       /* one stored block of gzip holds 65535 bytes */
#define HEAD 15
#define TAIL 8

/* gzip's header without a time; the extra-flags byte 0xB1 is how we know our own. */
static const uint8_t GZ_HEAD[10] = { 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0xB1, 255 };
static uint8_t buf[HEAD + MAX_TAR + TAIL + 1];
static uint8_t *const tar = buf + HEAD;

static uint32_t crc(const uint8_t *p, size_t n) {
    uint32_t c = ~0u;
    while (n--) {
        c ^= *p++;
        for (int k = 0; k < 8; k++) c = c >> 1 ^ (0xEDB88320u & -(c & 1));
    }
    return ~c;
}
static void le32(uint8_t *p, uint32_t v) { for (int i = 0; i < 4; i++) p[i] = v >> (8 * i); }
static void octal(uint8_t *at, int width, unsigned long long v) { snprintf((char *)at, width, "%0*llo", width - 1, v); }
static unsigned long long number(const uint8_t *at) { return strtoull((const char *)at, NULL, 8); }

/* ---- dump ---- */

static size_t used;
static dev_t top_dev;

static int attributes(int dirfd, const char *name) {
    char path[320];
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", dirfd, name);
    return llistxattr(path, NULL, 0) > 0;
}

static int entry(int dirfd, const char *name, const char *path, const struct stat *st) {
    uint8_t *h = tar + used;
    unsigned sum = 0;
    int dir = S_ISDIR(st->st_mode);
    if (used + 3 * BLOCK > MAX_TAR || strlen(path) + dir > 99 || st->st_uid > 07777777 || st->st_gid > 07777777) return -1;
    if (!dir && st->st_nlink > 1) return -1;
    if (attributes(dirfd, name)) return -1;
    snprintf((char *)h, 100, "%s%s", path, dir ? "/" : "");
    octal(h + 100, 8, st->st_mode & 07777);
    octal(h + 108, 8, st->st_uid);
    octal(h + 116, 8, st->st_gid);
    octal(h + 124, 12, 0);
    octal(h + 136, 12, st->st_mtime);
    octal(h + 500, 12, st->st_mtim.tv_nsec);        /* in ustar's padding: only we look there */
    memset(h + 148, ' ', 8);
    memcpy(h + 257, "ustar\00000", 8);
    if (dir) h[156] = '5';
    else if (S_ISLNK(st->st_mode)) {
        ssize_t n = readlinkat(dirfd, name, (char *)h + 157, 100);
        if (n <= 0 || n > 99) return -1;
        h[156] = '2';
    } else if (S_ISCHR(st->st_mode) || S_ISBLK(st->st_mode)) {
        h[156] = S_ISCHR(st->st_mode) ? '3' : '4';
        octal(h + 329, 8, major(st->st_rdev));
        octal(h + 337, 8, minor(st->st_rdev));
    } else if (S_ISFIFO(st->st_mode)) h[156] = '6';
    else return -1;                                 /* data: the real tar's work */
    for (int i = 0; i < BLOCK; i++) sum += h[i];
    octal(h + 148, 7, sum);
    used += BLOCK;
    return 0;
}

static int walk(int fd, const char *below) {
    DIR *d = fdopendir(fd);
    struct dirent *e;
    int bad = d ? 0 : -1;
    while (!bad && (e = readdir(d))) {
        char path[128];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (snprintf(path, sizeof path, "%s/%s", below, e->d_name) >= (int)sizeof path) bad = -1;
        else if (fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) || entry(fd, e->d_name, path, &st)) bad = -1;
        else if (S_ISDIR(st.st_mode) && st.st_dev == top_dev) {
            int sub = openat(fd, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            bad = sub < 0 ? -1 : walk(sub, path);
        }
    }
    if (d) closedir(d);
    return bad;
}

static int create(const char *dir) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st)) return -1;
    top_dev = st.st_dev;
    if (entry(fd, ".", ".", &st) || walk(fd, ".")) return -1;
    used += 2 * BLOCK;                              /* the end of a tar: two empty blocks */
    memcpy(buf, GZ_HEAD, 10);
    buf[10] = 1;                                    /* last block, stored */
    buf[11] = used & 255; buf[12] = used >> 8;
    buf[13] = ~buf[11]; buf[14] = ~buf[12];
    le32(tar + used, crc(tar, used));
    le32(tar + used + 4, used);
    for (size_t off = 0, size = HEAD + used + TAIL; off < size;) {
        ssize_t n = write(1, buf + off, size - off);
        if (n <= 0) return off ? -2 : -1;
        off += n;
    }
    return 0;
}

/* ---- restore ---- */

static int make(int top, const uint8_t *h) {
    char path[101] = { 0 };
    mode_t mode = number(h + 100);
    dev_t dev = makedev(number(h + 329), number(h + 337));
    memcpy(path, h, 100);
    size_t n = strlen(path);
    if (strstr(path, "..") || path[0] == '/') return -1;
    if (n && path[n - 1] == '/') path[--n] = 0;
    int bad = 0, link = h[156] == '2';
    if (h[156] == '5') bad = strcmp(path, ".") && mkdirat(top, path, 0700);
    else if (link) bad = symlinkat((const char *)h + 157, top, path);
    else bad = mknodat(top, path, (h[156] == '3' ? S_IFCHR : h[156] == '4' ? S_IFBLK : S_IFIFO) | mode, dev);
    if (bad || fchownat(top, path, number(h + 108), number(h + 116), AT_SYMLINK_NOFOLLOW)) return -1;
    return link ? 0 : fchmodat(top, path, mode, 0);
}

static int set_time(int top, const uint8_t *h) {
    struct timespec t[2] = { { .tv_nsec = UTIME_NOW }, { .tv_sec = number(h + 136), .tv_nsec = number(h + 500) } };
    char path[101] = { 0 };
    memcpy(path, h, 100);
    size_t n = strlen(path);
    if (n && path[n - 1] == '/') path[n - 1] = 0;
    return utimensat(top, path, t, AT_SYMLINK_NOFOLLOW);
}

static int extract(const char *dir) {
    off_t start = lseek(0, 0, SEEK_CUR);
    size_t have = 0, size;
    ssize_t n;
    if (start < 0) return -1;
    while (have < sizeof buf && (n = read(0, buf + have, sizeof buf - have)) > 0) have += n;
    size = have > HEAD + TAIL ? have - HEAD - TAIL : 0;
    uint32_t want = size ? tar[size] | tar[size + 1] << 8 | tar[size + 2] << 16 | (uint32_t)tar[size + 3] << 24 : 0;
    if (!size || have == sizeof buf || memcmp(buf, GZ_HEAD, 10) || (size_t)(buf[11] | buf[12] << 8) != size || crc(tar, size) != want) {
        lseek(0, start, SEEK_SET);
        return -1;
    }
    int top = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (top < 0) return -2;
    size_t end = 0;
    for (; end + BLOCK <= size && tar[end]; end += BLOCK) if (make(top, tar + end)) return -2;
    while (end) if (set_time(top, tar + (end -= BLOCK))) return -2;     /* backwards: a folder after what is in it */
    return 0;
}

int main(int argc, char **argv) {
    const char *dir = NULL, *verb = argc > 1 ? argv[1] : "";
    int gzip = 0, done = -1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--directory") == 0 && i + 1 < argc) dir = argv[i + 1];
        gzip |= strcmp(argv[i], "--gzip") == 0;
    }
    if (dir && gzip && strcmp(verb, "--create") == 0) done = create(dir);
    else if (dir && gzip && strcmp(verb, "--extract") == 0) done = extract(dir);
    if (done == 0) return 0;
    if (done == -2) { perror("tar (belayer)"); return 2; }  /* half done: not for another to do again */
    /* CRIU asks for neither, and a tmpfs would come back without attributes and with times cut to seconds. */
    static char *exact[] = { "--format=posix", "--xattrs", "--xattrs-include=*", "--acls" };
    char *args[128];
    int n = 0, more = dir && gzip && argc < 100;
    args[n++] = "tar";
    for (int i = 1; i < argc; i++) {
        args[n++] = argv[i];
        for (size_t k = 0; more && i == 1 && k < sizeof exact / sizeof *exact; k++) args[n++] = exact[k];
    }
    args[n] = NULL;
    if (argc < 100) execv(REAL, args);
    perror(REAL);
    return 2;
}
