/*
 * Sessions: long-lived shells that keep variables, directory and jobs from one action to the next.
 *
 * A shell reads its script from a pipe of ours. Each action is one `eval` in it with streams of its own, opened by path
 * below /proc/<pid>/fd of a process that holds them (ours, or an usher of the shell's user), and then tells its result
 * and what it has used on descriptor CTL_FD, which actions do not see.
 */
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *find_shell(const char **why) {
    static const char *known[] = { "/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh" };
    static char text[128];
    *why = "the image has no bash and no sh: run actions directly (argv)";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (access(known[i], X_OK) == 0) return known[i];
        if (errno == ENOENT || *why == text) continue;
        snprintf(text, sizeof text, "%s cannot be run (%s): run actions directly (argv)", known[i], strerror(errno));
        *why = text;
    }
    return NULL;
}

struct session *session_for(const char *name, const char **why) {
    struct session *free_one = NULL, *idle = NULL;
    for (int i = 0; i < MAX_SESSIONS; i++) {
        struct session *s = &sessions[i];
        if (s->shell && strcmp(s->name, name) == 0) return s;
        if (!s->shell && !s->act && strcmp(s->name, name) == 0) free_one = s;   /* keeps its directory */
        if (!s->shell && !s->act && (!idle || s->last_used < idle->last_used)) idle = s;
    }
    if (free_one) return free_one;
    if (strlen(name) > MAX_NAME) { *why = "the session's name is too long"; return NULL; }
    if (!idle) { *why = "too many sessions are open: end one with `exit`"; return NULL; }
    memset(idle, 0, sizeof *idle);
    strcpy(idle->name, name);
    idle->in.fd = idle->ctl.fd = -1;
    return idle;
}

static void run_shell(struct session *s, const struct who *w, const char *shell, int in, int ctl, uint64_t number) {
    sigset_t none;
    char **env = environment(w, NULL, 0);
    int null = open("/dev/null", O_RDWR);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setsid();
    expendable();
    mark(0, number);                                        /* before it is another user's, when nobody else may */
    /* above CTL_FD first, so that no dup2 overwrites an end that is still needed */
    in = fcntl(in, F_DUPFD_CLOEXEC, 20);
    ctl = fcntl(ctl, F_DUPFD_CLOEXEC, 20);
    dup2(in, 0); dup2(null, 1); dup2(null, 2); dup2(ctl, CTL_FD);
    if (null > 2 && null != CTL_FD) close(null);
    if (become(w)) _exit(126);
    if (*s->cwd && chdir(s->cwd)) (void)!chdir("/");
    if (strstr(shell, "bash")) execle(shell, "bash", "--noprofile", "--norc", NULL, env);
    execle(shell, "sh", NULL, env);
    _exit(127);
}

/* Returns NULL, or why there is no shell. */
const char *open_session(struct session *s, const struct who *w, const char *user, uint64_t number) {
    int in[2], ctl[2];
    const char *why, *shell = find_shell(&why);
    if (s->shell) return strcmp(s->user, user) && s->uid != w->uid ? "the session belongs to another user" : NULL;
    if (!shell) return why;
    if (pipe2(in, O_CLOEXEC)) return "no pipe for the session: too many open descriptors";
    if (pipe2(ctl, O_CLOEXEC)) { close(in[0]); close(in[1]); return "no pipe for the session: too many open descriptors"; }
    pid_t pid = fork();
    if (pid == 0) run_shell(s, w, shell, in[0], ctl[1], number);
    close(in[0]); close(ctl[1]);
    if (pid < 0) { close(in[1]); close(ctl[0]); return "no process for the session: the limit of processes is reached"; }
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(ctl[0], F_SETFL, O_NONBLOCK);
    s->shell = pid;
    s->uid = w->uid;
    snprintf(s->user, sizeof s->user, "%s", user);
    s->seen_us[0] = s->seen_us[1] = 0;
    watch_fd(&s->in, in[1], W_SHELL_IN, s, 0);
    watch_fd(&s->ctl, ctl[0], W_CTL, s, EPOLLIN);
    return NULL;
}

void feed_shell(struct session *s) {
    struct buf *b = &s->pending;
    while (b->off < b->len) {
        ssize_t n = write(s->in.fd, b->data + b->off, b->len - b->off);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) { rearm(&s->in, EPOLLOUT); return; }
        if (n < 0) break;                                   /* the shell is gone: SIGCHLD tells the rest */
        b->off += n;
    }
    drop(b);
    rearm(&s->in, 0);
}

static void text(struct buf *b, const char *t) { put(b, t, strlen(t)); }

static void quoted(struct buf *b, const char *t, size_t n) {
    text(b, "'");
    for (size_t i = 0; i < n; i++)
        if (t[i] == '\'') text(b, "'\\''"); else put(b, t + i, 1);
    text(b, "'");
}

void tell_shell(struct session *s, const struct act *a, const struct ask *q) {
    struct buf *b = &s->pending;
    char line[256];
    pid_t holder = a->usher ? a->usher : 1;
    text(b, "{ ");
    if (*q->cwd) { text(b, "cd -- "); quoted(b, q->cwd, strlen(q->cwd)); text(b, " && "); }
    for (const char *e = q->env; e < q->env + q->env_len; e += strlen(e) + 1) {
        size_t key = strcspn(e, "=");
        text(b, "export "); put(b, e, key + 1); quoted(b, e + key + 1, strlen(e + key + 1)); text(b, " && ");
    }
    text(b, "eval ");
    quoted(b, q->command, strlen(q->command));
    text(b, "; } ");
    if (a->input >= 0) snprintf(line, sizeof line, "</proc/%d/fd/%d ", holder, a->input);
    else snprintf(line, sizeof line, "</dev/null ");
    text(b, line);
    snprintf(line, sizeof line, ">/proc/%d/fd/%d 2>/proc/%d/fd/%d %d>&-\n{ command echo $?; command times; } >&%d\n",
             holder, a->stream[0].writer, holder, a->stream[1].writer, CTL_FD, CTL_FD);
    text(b, line);
    s->have_code = 0;
    s->line_len = 0;
    s->last_used = now_ms();
    feed_shell(s);
}

/* "1m2.345s" in microseconds; the decimal sign follows the session's locale. */
static uint64_t duration(const char **at) {
    uint64_t us = 0, unit = 100000;
    char *end;
    us = strtoull(*at, &end, 10) * 60000000;
    if (*end == 'm') us += strtoull(end + 1, &end, 10) * 1000000;
    if (*end == '.' || *end == ',')
        for (end++; *end >= '0' && *end <= '9'; end++, unit /= 10) us += (uint64_t)(*end - '0') * unit;
    while (*end && *end != ' ') end++;
    while (*end == ' ') end++;
    *at = end;
    return us;
}

/* Three lines end an action: the code, times of the shell itself, times of what it has waited for. */
static void ctl_line(struct session *s) {
    struct act *a = s->act;
    const char *at = s->line;
    if (!a) return;
    if (s->have_code++ == 0) { s->code = atoi(s->line); a->used_us[0] = a->used_us[1] = 0; return; }
    a->used_us[0] += duration(&at);
    a->used_us[1] += duration(&at);
    if (s->have_code < 3) return;
    for (int i = 0; i < 2; i++) {
        uint64_t total = a->used_us[i];
        a->used_us[i] = total > s->seen_us[i] ? total - s->seen_us[i] : 0;
        s->seen_us[i] = total;
    }
    if (!a->ending) act_ended(a, s->code, 0);
}

void read_ctl(struct session *s) {
    char c;
    while (s->ctl.fd >= 0 && read(s->ctl.fd, &c, 1) == 1) {
        if (c != '\n') { if (s->line_len < sizeof s->line - 1) s->line[s->line_len++] = c; continue; }
        s->line[s->line_len] = 0;
        s->line_len = 0;
        ctl_line(s);
    }
}

void shell_ended(struct session *s, int status) {
    struct act *a = s->act;
    unwatch(&s->in);
    unwatch(&s->ctl);
    drop(&s->pending);
    s->shell = 0;
    if (!a || !a->ending) s->cwd[0] = 0;                    /* it left by itself: the next one starts afresh */
    if (!a) return;
    a->flags |= F_SHELL_ENDED;
    if (WIFEXITED(status)) act_ended(a, WEXITSTATUS(status), 0);
    else act_ended(a, 128 + WTERMSIG(status), WTERMSIG(status));
}
