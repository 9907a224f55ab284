/*
 * OCI runtime registered in Docker as "belayer": runc, except that the `create` of a container for which envkeeper has
 * left a claim restores the processes of a checkpoint instead of starting the image's command.
 *
 * A claim is a file CLAIMS/<container id>, root only, written after `docker create` and renamed away here before use.
 * It is keyed by the id and lies outside of everything an image can influence; an environment variable would let an
 * image name a path of the host.
 *
 * A sandbox's container (one with CLAIMS/<container id>.owner) is started once: CLAIMS/<container id>.once is made (O_EXCL)
 * by its first start. A second one would run the image's command over the upper layer of a life that has ended, next to
 * its successor: refused.
 *
 * Lines of a claim, key=value: images, work, config (a CRIU configuration file), path (PATH for runc and criu),
 * network ("none": loopback only), room ("1": restore below raised limits, see below).
 * The images carry no network namespace: it is made or joined here, and what runc restores inherits it.
 *
 * A restore needs more of a sandbox's limits than its life did: CRIU runs below them, beside what it brings back. So a
 * sandbox is restored below higher ones (`with_room`) for an envkeeper that says it will put the true ones on before it
 * serves the life (envkeeper/limits.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define CLAIMS "/run/belayer-runtime/claims"
#define API "/run/belayer-runtime/docker-api"

static const char *log_path;

/* Docker reads the reason of a failure from the file that `--log` names, not from stderr. */
static void die(const char *text) {
    int fd = log_path ? open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0 && !strpbrk(text, "\"\\\n")) dprintf(fd, "{\"level\":\"error\",\"msg\":\"belayer-runtime: %s\"}\n", text);
    dprintf(2, "belayer-runtime: %s\n", text);
    exit(1);
}

static void fail(const char *what, const char *name) {
    char text[4600];
    snprintf(text, sizeof text, "%s %s: %s", what, name, strerror(errno));
    die(text);
}

static char *slurp(const char *path, size_t *size) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) fail("cannot read", path);
    char *data = malloc(st.st_size + 1);
    size_t have = 0;
    while (data && have < (size_t)st.st_size) {
        ssize_t n = read(fd, data + have, st.st_size - have);
        if (n <= 0) fail("short read of", path);
        have += n;
    }
    if (!data) fail("no memory for", path);
    data[have] = 0;
    close(fd);
    if (size) *size = have;
    return data;
}

static const char *told(char *claim, const char *key) {
    static char kept[8][4096];
    static int used;
    size_t k = strlen(key);
    for (char *line = claim; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, k) || line[k] != '=') continue;
        size_t n = strcspn(line + k + 1, "\n");
        if (n >= sizeof kept[0] || used >= 8) break;
        memcpy(kept[used], line + k + 1, n);
        kept[used][n] = 0;
        return kept[used++];
    }
    return NULL;
}

static const char *value(char *claim, const char *key) {
    const char *found = told(claim, key);
    errno = EINVAL;
    if (!found) fail("claim has no", key);
    return found;
}

/* `text` with the number behind `key` raised by `add`, or -1 (no limit) for one below 0; as it is where there is no such limit. */
static char *replaced(char *text, size_t *n, const char *key, long long add) {
    char *from = strstr(text, "\"resources\":{"), *at = from ? strstr(from, key) : NULL, *end, *out;
    if (!at) return text;
    at += strlen(key);
    long long now = strtoll(at, &end, 10);
    if (end == at || now <= 0) return text;
    if (!(out = malloc(*n + 24))) fail("no memory for", key);
    int head = snprintf(out, *n + 24, "%.*s%lld", (int)(at - text), text, add < 0 ? -1 : now + add);
    memcpy(out + head, end, text + *n - end + 1);
    *n = head + (text + *n - end);
    free(text);
    return out;
}

/* Room for CRIU itself, a helper for each session whose leader has ended, and what each task needs before it is itself
   again. Bounded: a fork bomb runs on before its limit is back. Time alone harms nobody. */
static char *with_room(char *text, size_t *n) {
    static const char pids_key[] = "\"pids\":{\"limit\":";
    char *found = strstr(text, pids_key);
    long long pids = found ? strtoll(found + sizeof pids_key - 1, NULL, 10) : 0;
    long long tasks = pids > 0 && pids < 1024 ? pids : 1024, memory = (64 + 2 * tasks) << 20;
    text = replaced(text, n, pids_key, pids + 64);
    text = replaced(text, n, "\"memory\":{\"limit\":", memory);
    text = replaced(text, n, "\"swap\":", memory);
    return replaced(text, n, "\"quota\":", -1);
}

/* The annotation is the only way to hand runc per-container CRIU options such as manage-cgroups=ignore. */
static char *annotate(const char *bundle, const char *config, int alone, int room) {
    char path[4200], tmp[4200];
    size_t n;
    snprintf(path, sizeof path, "%s/config.json", bundle);
    snprintf(tmp, sizeof tmp, "%s/config.json.belayer", bundle);
    char *text = slurp(path, &n);
    if (n == 0 || text[0] != '{' || strchr(config, '"') || strchr(config, '\\')) { errno = EINVAL; fail("cannot annotate", path); }
    /* Docker's prestart hook hands the network namespace to dockerd (100 ms on Docker 20.10, which starts itself again
       for it). With no network there is nothing to hand over: loopback, which is all there is, is brought up below. */
    char *hook = strstr(text, "\"hooks\":{\"prestart\":[");
    if (hook && alone) memcpy(hook + 10, "none_", 5);
    if (room) text = with_room(text, &n);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || dprintf(fd, "{\"annotations\":{\"org.criu.config\":\"%s\"},", config) < 0) fail("cannot write", tmp);
    for (size_t off = 1; off < n;) {
        ssize_t w = write(fd, text + off, n - off);
        if (w <= 0) fail("cannot write", tmp);
        off += w;
    }
    close(fd);
    if (rename(tmp, path)) fail("cannot replace", path);
    return text;
}

/* Settings of the namespace that the container's specification names: runc writes them only for what it starts, not for
   what it restores, and a ping socket or an IPv6 address that was there would not be any more. */
static void settings(const char *spec) {
    const char *at = strstr(spec, "\"sysctl\":{");
    for (at = at ? at + 9 : NULL; at && at[1] == '"';) {
        char path[320] = "/proc/sys/", value[256];
        size_t key = strcspn(at + 2, "\""), size;
        const char *v = at + 2 + key + 3;
        if (strncmp(at + 2 + key, "\":\"", 3) || key > 250 || (size = strcspn(v, "\"")) >= sizeof value) { errno = EINVAL; fail("cannot read", "sysctl"); }
        memcpy(path + 10, at + 2, key);
        for (char *c = path + 10; *c; c++) if (*c == '.') *c = '/';
        memcpy(value, v, size);
        if (strncmp(path + 10, "net/", 4) == 0) {
            int fd = open(path, O_WRONLY | O_CLOEXEC);
            if (fd < 0 || write(fd, value, size) != (ssize_t)size) fail("cannot set", path);
            close(fd);
        }
        at = v + size + 1;
        if (*at != ',') break;
    }
}

static void own_network(const char *spec) {
    const char *ns = strstr(spec, "\"type\":\"network\"");
    if (!ns) return;                                    /* the host's namespace: nothing to join */
    const char *end = strchr(ns, '}'), *path = strstr(ns, "\"path\":\"");
    if (path && end && path < end) {
        char name[4096];
        size_t n = strcspn(path + 8, "\"");
        if (n >= sizeof name) { errno = ENAMETOOLONG; fail("network namespace", "path"); }
        memcpy(name, path + 8, n);
        name[n] = 0;
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET)) fail("cannot join", name);
        close(fd);
        return;
    }
    struct ifreq lo = { .ifr_name = "lo" };
    if (unshare(CLONE_NEWNET)) fail("cannot make a", "network namespace");
    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s < 0 || ioctl(s, SIOCGIFFLAGS, &lo)) fail("cannot read", "lo");
    lo.ifr_flags |= IFF_UP | IFF_RUNNING;
    if (ioctl(s, SIOCSIFFLAGS, &lo)) fail("cannot bring up", "lo");
    close(s);
    settings(spec);
}

static void restore(int argc, char **argv, int verb, char *claim) {
    char *args[96];
    const char *bundle = NULL, *pid_file = NULL;
    int n = 0;
    if (verb > 40) { errno = E2BIG; fail("too many", "arguments"); }
    for (int i = verb + 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--bundle") == 0) bundle = argv[i + 1];
        if (strcmp(argv[i], "--pid-file") == 0) pid_file = argv[i + 1];
    }
    if (!bundle || !pid_file) { errno = EINVAL; fail("create without", "--bundle or --pid-file"); }
    setenv("PATH", value(claim, "path"), 1);
    own_network(annotate(bundle, value(claim, "config"), strcmp(value(claim, "network"), "none") == 0, told(claim, "room") != NULL));
    for (int i = 0; i < verb; i++) args[n++] = argv[i];
    args[0] = "runc";
    const char *more[] = { "restore", "--detach", "--bundle", bundle, "--pid-file", pid_file, "--image-path", value(claim, "images"),
                           "--work-path", value(claim, "work"), "--tcp-established", "--file-locks", "--ext-unix-sk", argv[argc - 1] };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) args[n++] = (char *)more[i];
    args[n] = NULL;
    execvp("runc", args);
    fail("cannot run", "runc");
}

/* The fallback through Docker's own checkpoint API (envkeeper/docker_api.py): the CRIU that runc starts gets our settings
   in the same way, from a file that envkeeper leaves while it is configured so. */
static void settings_of_api(int argc, char **argv, int verb, int room) {
    if (access(API, R_OK)) return;
    char *kept = slurp(API, NULL);
    setenv("PATH", value(kept, "path"), 1);
    for (int i = verb + 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--bundle") == 0) annotate(argv[i + 1], value(kept, "config"), 0, room && told(kept, "room"));
}

/* Without an owner the container is nobody's sandbox, and whoever made it may do as he likes. */
static int owned(const char *claim) {
    char owner[520];
    snprintf(owner, sizeof owner, "%s.owner", claim);
    return access(owner, F_OK) == 0;
}

static void only_once(const char *claim) {
    char once[520];
    snprintf(once, sizeof once, "%s.once", claim);
    if (!owned(claim)) return;
    int fd = open(once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0) close(fd);
    else if (errno == EEXIST) die("this container has been started before: a sandbox has one life, restore its checkpoint");
    else if (errno != ENOENT) fail("cannot make", once);
}

int main(int argc, char **argv) {
    static const char *verbs[] = { "create", "start", "checkpoint", "restore" };
    char claim[512], used[520], started[520];
    int verb = 0;
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--log") == 0) log_path = argv[i + 1];
    for (int i = 1; i < argc && !verb; i++)
        for (size_t k = 0; k < sizeof verbs / sizeof *verbs && !verb; k++)
            if (strcmp(argv[i], verbs[k]) == 0) verb = i;
    if (verb && argc > verb + 1 && strlen(argv[argc - 1]) <= 128 && !strchr(argv[argc - 1], '/')) {
        snprintf(claim, sizeof claim, CLAIMS "/%s", argv[argc - 1]);
        snprintf(used, sizeof used, "%s.used", claim);
        snprintf(started, sizeof started, "%s.started", claim);
        int begins = strcmp(argv[verb], "create") == 0 || strcmp(argv[verb], "restore") == 0;
        if (begins) only_once(claim);
        if (strcmp(argv[verb], "create") == 0 && rename(claim, used) == 0) restore(argc, argv, verb, slurp(used, NULL));
        if (begins || strcmp(argv[verb], "checkpoint") == 0) 
            settings_of_api(argc, argv, verb, strcmp(argv[verb], "restore") == 0 && owned(claim));
        /* What was restored runs already; runc would refuse to start it. */
        if (strcmp(argv[verb], "start") == 0 && rename(used, started) == 0) return 0;
    }
    argv[0] = "runc";
    execvp("runc", argv);
    fail("cannot run", "runc");
}
