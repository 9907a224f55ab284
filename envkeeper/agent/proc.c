/*
 * Which processes belong to an action.
 *
 * Each action's first process gets a mark that every descendant inherits, through fork, exec, setsid and double fork:
 * the soft limit RLIMIT_LOCKS, which the kernel has not enforced since 2.4 and carries all the same. A service that an
 * earlier action left behind has that action's mark, also in children that it forks now, and is never touched. A
 * program that takes the mark off (su with pam_limits does) is still found while its parent has it.
 */
#include "agent.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MARK (1ull << 40)
#define MAX_PIDS 4096
#define STOP_ROUNDS 8

struct row { pid_t pid, parent; uint64_t mark; char state; char ours; };

static ssize_t slurp(const char *dir, pid_t pid, const char *name, char *into, size_t size) {
    char path[64];
    ssize_t n;
    int fd;
    snprintf(path, sizeof path, "%s/%d/%s", dir, pid, name);
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) return -1;
    n = read(fd, into, size - 1);
    close(fd);
    if (n >= 0) into[n] = 0;
    return n;
}

/* When the sandbox runs out of memory the kernel shall take what it runs, not PID 1: with that, all would be lost. On a
   host that runs out, a sandbox goes before an engine. Raising it needs no right, and children inherit it. */
void expendable(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    (void)!write(fd, "500", 3);
    close(fd);
}

int mark(pid_t pid, uint64_t number) {
    struct rlimit now;
    if (prlimit(pid, RLIMIT_LOCKS, NULL, &now)) return -1;
    now.rlim_cur = MARK | (number & (MARK - 1));
    return now.rlim_cur <= now.rlim_max ? prlimit(pid, RLIMIT_LOCKS, &now, NULL) : -1;
}

static int look(pid_t pid, struct row *r) {
    char text[4096], *at;
    if (slurp("/proc", pid, "stat", text, sizeof text) <= 0 || !(at = strrchr(text, ')'))) return 0;
    r->pid = pid;
    r->ours = 0;
    if (sscanf(at + 1, " %c %d", &r->state, &r->parent) != 2 || r->state == 'Z' || r->state == 'X') return 0;
    r->mark = 0;
    if (slurp("/proc", pid, "limits", text, sizeof text) > 0 && (at = strstr(text, "Max file locks")))
        r->mark = strtoull(at + 14, NULL, 10);              /* "unlimited" is 0: no mark */
    return 1;
}

static int scan(struct row *rows, uint64_t number) {
    DIR *d = opendir("/proc");
    struct dirent *e;
    int n = 0, more = 1;
    if (!d) return 0;
    while ((e = readdir(d)) && n < MAX_PIDS) {
        int pid = atoi(e->d_name);
        if (pid > 1 && look(pid, &rows[n])) n++;
    }
    closedir(d);
    for (int i = 0; i < n; i++) rows[i].ours = rows[i].mark == (MARK | (number & (MARK - 1)));
    while (more) {
        more = 0;
        for (int i = 0; i < n; i++) {
            if (rows[i].ours || rows[i].mark & MARK) continue;
            for (int j = 0; j < n; j++)
                if (rows[j].ours && rows[j].pid == rows[i].parent) { rows[i].ours = more = 1; break; }
        }
    }
    return n;
}

/* Everything stops before anything dies: what is stopped forks no more, and holds its place under the limit of pids,
   so that a fork bomb starves. Returns how many were still there. */
int kill_marked(uint64_t number) {
    static struct row rows[MAX_PIDS];
    int n = 0, left = 0;
    for (int round = 0; round < STOP_ROUNDS; round++) {
        int running = 0;
        n = scan(rows, number);
        for (int i = 0; i < n; i++)
            if (rows[i].ours && rows[i].state != 'T' && kill(rows[i].pid, SIGSTOP) == 0) running++;
        if (!running) break;
    }
    for (int i = 0; i < n; i++)
        if (rows[i].ours) { kill(rows[i].pid, SIGKILL); left++; }
    return left;
}
