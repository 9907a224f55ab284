/* One action: started in a session or directly, its two streams, its end by itself or by the clock. */
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROUND_MS 10
#define MAX_ROUNDS 500

/* ---- streams ---- */

static void keep_tail(struct act *a, struct stream *s, const uint8_t *p, size_t n) {
    if (!a->tail_cap) return;
    if (!s->tail && !(s->tail = malloc(a->tail_cap))) die("out of memory");
    if (n > a->tail_cap) { p += n - a->tail_cap; n = a->tail_cap; }
    while (n) {                                             /* a ring: tail_at is where the next byte goes */
        size_t part = a->tail_cap - s->tail_at < n ? a->tail_cap - s->tail_at : n;
        memcpy(s->tail + s->tail_at, p, part);
        s->tail_at = (s->tail_at + part) % a->tail_cap;
        s->tail_len = s->tail_len + part > a->tail_cap ? a->tail_cap : s->tail_len + part;
        p += part; n -= part;
    }
}

void take_output(struct act *a, int which) {
    struct stream *s = &a->stream[which];
    uint8_t chunk[65536];
    ssize_t n;
    while ((n = read(s->out->fd, chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR)) {
        if (n < 0) continue;
        size_t room = a->head - s->sent, first = (size_t)n < room ? (size_t)n : room;
        s->total += n;
        if (first) { frame(a->conn, which ? 'e' : 'o', chunk, first); s->sent += first; }
        if (first < (size_t)n) keep_tail(a, s, chunk + first, n - first);
    }
    if (a->conn) flush_conn(a->conn);
}

static void send_tail(struct act *a, int which) {
    struct stream *s = &a->stream[which];
    uint32_t start = s->tail_len < a->tail_cap ? 0 : s->tail_at;
    if (s->total > (uint64_t)a->head + a->tail_cap) a->flags |= which ? F_ERR_CUT : F_OUT_CUT;
    if (s->tail_len) {
        frame(a->conn, which ? 'E' : 'O', s->tail + start, s->tail_len - start);
        if (start) frame(a->conn, which ? 'E' : 'O', s->tail, start);
    }
    free(s->tail);
    s->tail = NULL;
}

/* What a service writes after its action ended is dropped, but read: it must not die of SIGPIPE, nor block. */
void take_leftover(struct watch *w) {
    uint8_t chunk[65536];
    ssize_t n;
    while ((n = read(w->fd, chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR)) {}
    if (n == 0) { unwatch(w); free(w); }
}

static void close_streams(struct act *a) {
    for (int i = 0; i < 2; i++) {
        if (a->stream[i].out) { unwatch(a->stream[i].out); free(a->stream[i].out); }
        if (a->stream[i].writer >= 0) close(a->stream[i].writer);
    }
    if (a->input >= 0) close(a->input);
}

static int open_streams(struct act *a, const struct who *w, const struct ask *q) {
    a->input = a->stream[0].writer = a->stream[1].writer = -1;
    for (int i = 0; i < 2; i++) {
        int p[2];
        if (pipe2(p, O_CLOEXEC)) { close_streams(a); return -1; }
        if (!(a->stream[i].out = malloc(sizeof(struct watch)))) die("out of memory");
        fcntl(p[0], F_SETFL, O_NONBLOCK);
        a->stream[i].writer = p[1];
        watch_fd(a->stream[i].out, p[0], i ? W_ERR : W_OUT, a, EPOLLIN);
        if (w->uid && fchown(p[1], w->uid, w->gid)) { close_streams(a); return -1; }    /* it is opened again by path */
    }
    if (!q->has_input) return 0;
    a->input = memfd_create("stdin", MFD_CLOEXEC);
    if (a->input < 0 || (w->uid && fchown(a->input, w->uid, w->gid))) { close_streams(a); return -1; }
    for (uint32_t off = 0; off < q->input_len;) {
        ssize_t n = write(a->input, q->input + off, q->input_len - off);
        if (n <= 0) { close_streams(a); return -1; }
        off += n;
    }
    lseek(a->input, 0, SEEK_SET);
    return 0;
}

/* ---- the end ---- */

static void done(struct act *a) {
    uint8_t r[56];
    uint32_t ms = (uint32_t)(now_ms() - a->started);
    int32_t code = a->ending ? 124 : a->code;
    uint32_t sig = a->signal;
    uint64_t rss = a->max_rss;
    struct conn *conn = a->conn;
    for (int i = 0; i < 2; i++) {
        struct stream *s = &a->stream[i];
        take_output(a, i);                  /* all of it is in the pipe already: the writes came before the result */
        send_tail(a, i);
        s->out->kind = W_LEFTOVER;
        s->out->owner = NULL;
        s->out = NULL;
        close(s->writer);
    }
    if (a->input >= 0) close(a->input);
    if (a->usher) kill(a->usher, SIGKILL);
    if (a->session) a->session->act = NULL;
    last_done = a->number;
    a->used = 0;
    if (!conn || a->conn != conn) return;
    memcpy(r, &code, 4); memcpy(r + 4, &sig, 4); memcpy(r + 8, &a->flags, 4); memcpy(r + 12, &ms, 4);
    memcpy(r + 16, &a->stream[0].total, 8); memcpy(r + 24, &a->stream[1].total, 8);
    memcpy(r + 32, a->used_us, 16); memcpy(r + 48, &rss, 8);
    conn->act = NULL;
    a->conn = NULL;
    frame(conn, 'r', r, sizeof r);
    finish(conn);
}

void act_ended(struct act *a, int code, int signal) {
    a->reaped = 1;
    a->code = code;
    a->signal = signal;
    if (a->ending) a->deadline = now_ms(); else done(a);    /* an ending one is done when nothing of it is left */
}

void usage_of(struct act *a, const struct rusage *used) {
    uint64_t us[2] = { (uint64_t)used->ru_utime.tv_sec * 1000000 + used->ru_utime.tv_usec,
                       (uint64_t)used->ru_stime.tv_sec * 1000000 + used->ru_stime.tv_usec };
    for (int i = 0; i < 2; i++) {
        uint64_t seen = a->session ? a->session->seen_us[i] : 0;
        a->used_us[i] = us[i] > seen ? us[i] - seen : 0;
    }
    a->max_rss = a->session ? 0 : used->ru_maxrss;          /* a shell's own high mark is that of its whole life */
}

static void keep_directory(struct session *s) {
    char link[32];
    ssize_t n;
    snprintf(link, sizeof link, "/proc/%d/cwd", s->shell);
    setfsuid(s->uid);                                       /* without CAP_SYS_PTRACE only its own user may look */
    n = readlink(link, s->cwd, sizeof s->cwd - 1);
    setfsuid(0);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);                     /* a change of user takes it away: root's shells open their streams below /proc/1/fd */
    s->cwd[n > 0 ? n : 0] = 0;
}

/* The shell stops first: what follows in its script must not begin when what it waits for dies. */
static void begin_end(struct act *a, uint32_t flag) {
    a->ending = 1;
    a->flags |= flag;
    if (a->session && a->session->shell) {
        kill(a->session->shell, SIGSTOP);
        keep_directory(a->session);
    }
}

void press_on(struct act *a) {
    if (!a->ending) begin_end(a, F_TIMED_OUT);
    int left = kill_marked(a->number);
    pid_t first = a->session ? a->session->shell : a->pid;
    if (first && !a->reaped) kill(first, SIGKILL);
    if (!left && a->reaped) { done(a); return; }
    if (++a->rounds > MAX_ROUNDS) { a->flags |= F_UNKILLED; done(a); return; }
    a->deadline = now_ms() + ROUND_MS;
}

void stop_action(struct conn *c, const uint8_t *body, size_t n) {
    uint64_t number;
    if (n != 8) { refuse(c, "short stop request"); return; }
    memcpy(&number, body, 8);
    for (int i = 0; i < MAX_SESSIONS; i++) {
        struct act *a = &acts[i];
        if (!a->used || a->number != number || a->ending) continue;
        begin_end(a, F_STOPPED);
        a->deadline = now_ms();
    }
    frame(c, 'k', "", 0);
    finish(c);
}

/* ---- the beginning ---- */

/* Holds the action's streams for a shell of another user: only a process of that user may open them by path, and only
   such a one may put the mark on the shell. */
static pid_t usher(const struct who *w, const struct act *a, pid_t shell) {
    int ready[2];
    char c;
    if (pipe2(ready, O_CLOEXEC)) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        sigset_t none;
        forget_nonce();                                     /* that user may read this memory */
        for (int fd = 3; fd < 1024; fd++)
            if (fd != a->stream[0].writer && fd != a->stream[1].writer && fd != a->input && fd != ready[1]) close(fd);
        if (become(w)) _exit(1);
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);                 /* a change of user takes it away, and /proc/<pid>/fd with it */
        if (shell && mark(shell, a->number)) _exit(1);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        (void)!write(ready[1], "r", 1);
        for (;;) pause();
    }
    close(ready[1]);
    if (pid > 0 && read(ready[0], &c, 1) != 1) pid = -1;
    close(ready[0]);
    return pid;
}

static char **argv_of(const struct ask *q) {
    uint32_t n = 0, i = 0;
    char **argv;
    for (uint32_t at = 0; at < q->command_len; at++) n += q->command[at] == 0;
    if (!(argv = calloc(n + 1, sizeof *argv))) die("out of memory");
    for (char *at = q->command; i < n; at += strlen(at) + 1) argv[i++] = at;
    return argv;
}

static void run_directly(struct act *a, const struct who *w, const struct ask *q) {
    extern char **environ;
    char **argv = argv_of(q);
    sigset_t none;
    int in = a->input >= 0 ? a->input : open("/dev/null", O_RDONLY);
    environ = environment(w, q->env, q->env_len);
    setsid();
    expendable();
    mark(0, a->number);
    sigemptyset(&none);
    signal(SIGPIPE, SIG_DFL);
    dup2(in, 0); dup2(a->stream[0].writer, 1); dup2(a->stream[1].writer, 2);
    syscall(SYS_close_range, 3u, ~0u, 0u);                  /* all are close-on-exec anyway */
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (become(w)) { dprintf(2, "belayer: cannot become user %u: %s\n", w->uid, strerror(errno)); _exit(126); }
    if (*q->cwd && chdir(q->cwd)) { dprintf(2, "belayer: cannot enter %s: %s\n", q->cwd, strerror(errno)); _exit(126); }
    execvp(argv[0], argv);
    dprintf(2, "belayer: cannot run %s: %s\n", argv[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static int parse(struct ask *q, uint8_t *body, size_t n) {
    struct cursor k = { body, n, 0 };
    uint32_t len;
    q->number = take_u64(&k);
    q->timeout = take_u32(&k);
    q->cap = take_u32(&k);
    q->direct = take_u32(&k);
    q->has_input = (int)take_u32(&k);
    q->session = (char *)take_bytes(&k, &len);
    q->command = (char *)take_bytes(&k, &q->command_len);
    q->env = (char *)take_bytes(&k, &q->env_len);
    q->cwd = (char *)take_bytes(&k, &len);
    q->user = (char *)take_bytes(&k, &len);
    q->input = take_bytes(&k, &q->input_len);
    if (q->direct && (!q->command_len || q->command[q->command_len - 1])) k.bad = 1;
    if (q->env_len && q->env[q->env_len - 1]) k.bad = 1;
    return k.bad ? -1 : 0;
}

static struct act *free_act(void) {
    for (int i = 0; i < MAX_SESSIONS; i++)
        if (!acts[i].used) { memset(&acts[i], 0, sizeof acts[i]); return &acts[i]; }
    return NULL;
}

void start_action(struct conn *c, uint8_t *body, size_t n) {
    struct ask q;
    struct who w;
    struct session *s = NULL;
    struct act *a = free_act();
    pid_t before = 0;                                       /* the shell, when it is to be marked: a new one marks itself */
    const char *why = NULL;
    if (parse(&q, body, n)) { refuse(c, "short action request"); return; }
    if (!a) { refuse(c, "too many actions in flight"); return; }
    if (!q.direct && !(s = session_for(q.session, &why))) { refuse(c, why); return; }
    if (s && s->act) { refuse(c, "busy: an action is in flight"); return; }
    if (s) before = s->shell;
    if ((why = find_user(q.user, &w)) || (s && (why = open_session(s, &w, q.user, q.number)))) { refuse(c, why); return; }
    if (open_streams(a, &w, &q)) { refuse(c, "no streams for the action: too many open descriptors, or no memory"); return; }
    a->number = q.number;
    a->head = q.cap - q.cap / 2;
    a->tail_cap = q.cap / 2;
    a->started = now_ms();
    a->deadline = q.timeout ? a->started + q.timeout : 0;
    if (s && w.uid) a->usher = usher(&w, a, before);
    else if (s && before && mark(before, q.number)) a->usher = -1;
    else if (!s && (a->pid = fork()) == 0) run_directly(a, &w, &q);
    if (a->usher < 0 || a->pid < 0) {
        close_streams(a);
        refuse(c, s ? "the session cannot be told apart (its shell changed its user or its limits), or no process is left"
                    : "no process for the action: the limit of processes is reached");
        return;
    }
    a->used = 1;
    a->conn = c;
    c->act = a;
    if (s) { a->session = s; s->act = a; tell_shell(s, a, &q); }
}
