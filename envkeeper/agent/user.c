/* Users of the image, from its own /etc/passwd and /etc/group; no C library lookups, which may talk to a daemon. */
#include "agent.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_FILE (1 << 20)

extern char **environ;

/* NULL when it is missing or no plain file: a fifo there must not hold the agent up. */
static char *slurp(const char *path) {
    struct stat st;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size < MAX_FILE && (text = malloc(st.st_size + 1))) {
        ssize_t n = read(fd, text, st.st_size);
        text[n > 0 ? n : 0] = 0;
    }
    close(fd);
    return text;
}

/* Splits "a:b:c" in place; returns the number of fields. */
static int fields(char *line, char **into, int max) {
    int n = 0;
    for (char *at = line; at && n < max; n++) {
        into[n] = at;
        if ((at = strchr(at, ':'))) *at++ = 0;
    }
    return n;
}

static int number(const char *text, unsigned *value) {
    char *end;
    unsigned long v;
    if (!isdigit((unsigned char)*text)) return 0;
    errno = 0;
    v = strtoul(text, &end, 10);
    if (*end || errno || v >= 0xffffffffu) return 0;
    *value = (unsigned)v;
    return 1;
}

static int in_list(char *list, const char *name) {
    for (char *at = strtok(list, ","); at; at = strtok(NULL, ","))
        if (strcmp(at, name) == 0) return 1;
    return 0;
}

static int find_group(const char *spec, gid_t *gid) {
    unsigned value;
    char *text, *save, *f[4];
    int found = number(spec, &value);
    if (found) { *gid = value; return 1; }
    if (!(text = slurp("/etc/group"))) return 0;
    for (char *line = strtok_r(text, "\n", &save); line && !found; line = strtok_r(NULL, "\n", &save))
        if (fields(line, f, 4) >= 3 && strcmp(f[0], spec) == 0 && number(f[2], &value)) { *gid = value; found = 1; }
    free(text);
    return found;
}

static void find_groups(struct who *w) {
    char *text = slurp("/etc/group"), *save, *f[4];
    unsigned value;
    w->groups[w->n_groups++] = w->gid;
    if (!text) return;
    for (char *line = strtok_r(text, "\n", &save); line && w->n_groups < 64; line = strtok_r(NULL, "\n", &save))
        if (fields(line, f, 4) == 4 && number(f[2], &value) && value != w->gid && in_list(f[3], w->name))
            w->groups[w->n_groups++] = value;
    free(text);
}

static int find_passwd(const char *name, int by_number, unsigned uid, struct who *w) {
    char *text = slurp("/etc/passwd"), *save, *f[7];
    unsigned u, g;
    int found = 0;
    if (!text) return 0;
    for (char *line = strtok_r(text, "\n", &save); line && !found; line = strtok_r(NULL, "\n", &save)) {
        if (fields(line, f, 7) < 6 || !number(f[2], &u) || !number(f[3], &g)) continue;
        if (by_number ? u != uid : strcmp(f[0], name) != 0) continue;
        w->uid = u; w->gid = g;
        snprintf(w->name, sizeof w->name, "%s", f[0]);
        snprintf(w->home, sizeof w->home, "%s", *f[5] ? f[5] : "/");
        found = 1;
    }
    free(text);
    return found;
}

/* "", "name", "uid", each with ":group" or ":gid". Returns NULL, or why there is no such user. */
const char *find_user(const char *spec, struct who *w) {
    char name[MAX_NAME * 2 + 2], *group;
    unsigned uid = 0;
    int numeric;
    memset(w, 0, sizeof *w);
    snprintf(w->home, sizeof w->home, "/");
    if (strlen(spec) >= sizeof name) return "the user's name is too long";
    strcpy(name, *spec ? spec : "0");
    if ((group = strchr(name, ':'))) *group++ = 0;
    numeric = number(name, &uid);
    w->uid = uid;
    if (!find_passwd(name, numeric, uid, w) && !numeric) return "no such user in the image's /etc/passwd";
    if (group && !find_group(group, &w->gid)) return "no such group in the image's /etc/group";
    if (*w->name) find_groups(w); else w->groups[w->n_groups++] = w->gid;
    return NULL;
}

int become(const struct who *w) {
    if (setgroups(w->n_groups, w->groups) || setresgid(w->gid, w->gid, w->gid)) return -1;
    return setresuid(w->uid, w->uid, w->uid);
}

static void set_env(char **env, int *n, const char *entry) {
    size_t key = strcspn(entry, "=") + 1;
    for (int i = 0; i < *n; i++)
        if (strncmp(env[i], entry, key) == 0) { env[i] = strdup(entry); return; }
    env[(*n)++] = strdup(entry);
}

/* For a child that will exec: nothing of it is ever freed. */
char **environment(const struct who *w, const char *extra, uint32_t extra_len) {
    int n = 0, room = 8;
    char entry[600], **env;
    for (char **e = environ; *e; e++) room++;
    for (uint32_t i = 0; i < extra_len; i++) room += extra[i] == 0;
    if (!(env = calloc(room, sizeof *env))) die("out of memory");
    for (char **e = environ; *e; e++) env[n++] = *e;
    if (w->uid) {
        snprintf(entry, sizeof entry, "HOME=%s", w->home);
        set_env(env, &n, entry);
    }
    if (w->uid && *w->name) {
        snprintf(entry, sizeof entry, "USER=%s", w->name);
        set_env(env, &n, entry);
        snprintf(entry, sizeof entry, "LOGNAME=%s", w->name);
        set_env(env, &n, entry);
    }
    for (const char *e = extra; e < extra + extra_len; e += strlen(e) + 1) set_env(env, &n, e);
    return env;
}
