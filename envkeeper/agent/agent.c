/*
 * PID 1 of every sandbox.
 *
 * Reaps orphans, keeps one long-lived shell per session, runs actions in it, and holds the nonce that proves after a
 * restore that this very memory came back. Everything an action starts is a child of this process tree, which is the
 * only thing that a process dump carries.
 *
 * Talks over a unix stream socket inside the container; one connection carries one request and is closed by us after
 * the answer, so that no connection crosses a boundary (a dump refuses sockets whose peer is outside).
 * A peer is accepted only when the kernel shows its pid as 0, which means that it lives outside our pid namespace:
 * programs of the sandbox cannot drive the agent.
 *
 * Frames, little endian: u32 length of what follows, u8 kind, body.
 *   request  P            ping                     -> p: u32 protocol, u32 sessions, u32 busy, u64 last finished action
 *            N nonce      set the nonce            -> k
 *            Q            ask the nonce back       -> n: nonce
 *            X u32 session, u64 action, u32 timeout ms (0: none), u32 cap per stream, command
 *                                                  -> o / e chunks as they come, then
 *                                                     r: i32 code, u32 flags, u64 stdout bytes, u64 stderr bytes, u32 ms
 *   error    !: text
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PROTOCOL 1
#define SOCKET_PATH "/run/belayer-agent.sock"
#define MAX_REQUEST (8u << 20)
#define MAX_SESSIONS 16
#define MAX_PIDS 4096
#define CTL_FD 9
#define KILL_ROUNDS 5
#define KILL_ROUND_MS 200

enum { F_TIMED_OUT = 1, F_SHELL_ENDED = 2, F_OUT_CUT = 4, F_ERR_CUT = 8 };
enum kind { W_SIGNAL, W_LISTEN, W_CONN, W_SHELL_IN, W_CTL, W_OUT, W_ERR, W_LEFTOVER };

struct buf { uint8_t *data; size_t len, cap, off; };
struct watch { int fd; enum kind kind; void *owner; };
struct session;

struct conn {
    struct watch w;
    struct buf in, out;
    struct session *session;            /* set while its action runs */
    int closing;
};

struct session {
    uint32_t id;
    pid_t shell;
    struct watch in, ctl, *out[2];      /* our ends: shell's stdin, result pipe, the action's two streams */
    int writer[2];                      /* kept open while the action runs, so that a stream never ends early */
    struct buf pending;                 /* script not yet taken by the shell */
    struct conn *conn;                  /* may be NULL while an action runs: its client went away */
    int used, busy;
    uint64_t action, total[2], started, deadline;
    uint32_t limit, sent[2], flags, rounds;
    char code[16]; size_t code_len;
    pid_t before[MAX_PIDS]; int before_n;
};

static int ep;
static struct session sessions[MAX_SESSIONS];
static uint64_t last_done;
static uint8_t nonce[64];
static size_t nonce_len;
static struct conn *dead_conns[256]; static int dead_n;     /* freed after the current batch of events */

static void die(const char *what) { dprintf(2, "belayer-agent: %s: %s\n", what, strerror(errno)); _exit(70); }

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void put(struct buf *b, const void *p, size_t n) {
    if (b->len + n > b->cap) {
        b->cap = (b->len + n) * 2 + 256;
        b->data = realloc(b->data, b->cap);
        if (!b->data) die("out of memory");
    }
    memcpy(b->data + b->len, p, n);
    b->len += n;
}
static void drop(struct buf *b) { free(b->data); memset(b, 0, sizeof *b); }

static void watch_fd(struct watch *w, int fd, enum kind kind, void *owner, uint32_t events) {
    struct epoll_event e = { .events = events, .data.ptr = w };
    w->fd = fd; w->kind = kind; w->owner = owner;
    if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)) die("epoll add");
}
static void rearm(struct watch *w, uint32_t events) {
    struct epoll_event e = { .events = events, .data.ptr = w };
    epoll_ctl(ep, EPOLL_CTL_MOD, w->fd, &e);
}
static void unwatch(struct watch *w) {
    if (w->fd < 0) return;
    epoll_ctl(ep, EPOLL_CTL_DEL, w->fd, NULL);
    close(w->fd);
    w->fd = -1;
}

/* ---- answers ---- */

static void flush_conn(struct conn *c);

static void frame(struct conn *c, uint8_t kind, const void *body, size_t n) {
    uint32_t len = (uint32_t)n + 1;
    if (!c || c->closing == 2) return;
    put(&c->out, &len, 4); put(&c->out, &kind, 1); put(&c->out, body, n);
}
static void end_conn(struct conn *c) {
    if (c->closing == 2) return;
    if (c->session) { c->session->conn = NULL; c->session = NULL; }
    c->closing = 2;
    unwatch(&c->w);
    if (dead_n < 256) dead_conns[dead_n++] = c;             /* beyond that it leaks, which is better than a dangling event */
}
static void finish(struct conn *c) { if (c && c->closing == 0) { c->closing = 1; flush_conn(c); } }
static void refuse(struct conn *c, const char *why) { frame(c, '!', why, strlen(why)); finish(c); }

static void flush_conn(struct conn *c) {
    while (c->out.off < c->out.len) {
        ssize_t n = send(c->w.fd, c->out.data + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) { rearm(&c->w, EPOLLIN | EPOLLOUT); return; }
        if (n < 0) { end_conn(c); return; }
        c->out.off += n;
    }
    c->out.len = c->out.off = 0;
    if (c->closing) end_conn(c); else rearm(&c->w, EPOLLIN);
}

/* ---- processes ---- */

static int list_pids(pid_t *into, int max) {
    DIR *d = opendir("/proc");
    struct dirent *e;
    int n = 0;
    if (!d) return 0;
    while ((e = readdir(d)) && n < max) {
        int pid = atoi(e->d_name);
        if (pid > 1) into[n++] = pid;
    }
    closedir(d);
    return n;
}

/* Kills what the action started and nothing older: services of earlier actions must live on. */
static void kill_action(struct session *s) {
    static pid_t all[MAX_PIDS];
    int n = list_pids(all, MAX_PIDS);
    for (int i = 0; i < n; i++) {
        int old = all[i] == s->shell;
        for (int j = 0; j < s->before_n && !old; j++) old = s->before[j] == all[i];
        for (int j = 0; j < MAX_SESSIONS && !old; j++) old = sessions[j].used && sessions[j].shell == all[i];
        if (!old) kill(all[i], SIGKILL);
    }
}

static void start_shell(struct session *s) {
    int in[2], ctl[2];
    const char *shell = access("/bin/bash", X_OK) == 0 ? "/bin/bash" : "/bin/sh";
    if (pipe2(in, O_CLOEXEC) || pipe2(ctl, O_CLOEXEC)) die("pipe");
    pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid == 0) {
        sigset_t none;
        int null = open("/dev/null", O_RDWR);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        signal(SIGPIPE, SIG_DFL);
        setsid();
        /* above CTL_FD first, so that no dup2 overwrites an end that is still needed */
        int a = fcntl(in[0], F_DUPFD, 20), b = fcntl(ctl[1], F_DUPFD, 20);
        dup2(a, 0); dup2(null, 1); dup2(null, 2); dup2(b, CTL_FD);
        for (int fd = 3; fd < 1024; fd++) if (fd != CTL_FD) close(fd);
        if (strcmp(shell, "/bin/bash") == 0) execl(shell, "bash", "--noprofile", "--norc", NULL);
        execl("/bin/sh", "sh", NULL);
        _exit(127);
    }
    close(in[0]); close(ctl[1]);
    fcntl(in[1], F_SETFL, O_NONBLOCK); fcntl(ctl[0], F_SETFL, O_NONBLOCK);
    s->shell = pid;
    watch_fd(&s->in, in[1], W_SHELL_IN, s, 0);
    watch_fd(&s->ctl, ctl[0], W_CTL, s, EPOLLIN);
}

static void stop_shell(struct session *s) {
    unwatch(&s->in); unwatch(&s->ctl);
    drop(&s->pending);
    s->shell = 0;
}

static void feed_shell(struct session *s) {
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

/* ---- one action ---- */

static void take_output(struct session *s, int which) {
    uint8_t chunk[65536];
    ssize_t n;
    while ((n = read(s->out[which]->fd, chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR)) {
        if (n < 0) continue;
        size_t room = s->limit - s->sent[which], keep = (size_t)n < room ? (size_t)n : room;
        s->total[which] += n;
        if (keep) { frame(s->conn, which ? 'e' : 'o', chunk, keep); s->sent[which] += keep; }
        if (keep < (size_t)n) s->flags |= which ? F_ERR_CUT : F_OUT_CUT;
    }
    if (s->conn) flush_conn(s->conn);
}

/* What a service writes after its action ended is dropped, but read: it must not die of SIGPIPE, nor block. */
static void take_leftover(struct watch *w) {
    uint8_t chunk[65536];
    ssize_t n;
    while ((n = read(w->fd, chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR)) {}
    if (n == 0) { unwatch(w); free(w); }
}

static void action_done(struct session *s, int code) {
    uint8_t r[28];
    uint32_t ms = (uint32_t)(now_ms() - s->started);
    int32_t c = code;
    struct conn *conn;
    for (int i = 0; i < 2; i++) {
        take_output(s, i);                  /* all of it is in the pipe already: the writes came before the result */
        s->out[i]->kind = W_LEFTOVER;
        s->out[i] = NULL;
        close(s->writer[i]);
    }
    s->busy = 0;
    last_done = s->action;
    memcpy(r, &c, 4); memcpy(r + 4, &s->flags, 4);
    memcpy(r + 8, s->total, 16); memcpy(r + 24, &ms, 4);
    conn = s->conn;
    if (!conn) return;
    conn->session = NULL;
    s->conn = NULL;
    frame(conn, 'r', r, sizeof r);
    finish(conn);
}

static void shell_ended(struct session *s, int code) {
    stop_shell(s);
    if (!s->busy) return;
    s->flags |= F_SHELL_ENDED;
    action_done(s, s->flags & F_TIMED_OUT ? 124 : code);
}

static void read_ctl(struct session *s) {
    char c;
    while (s->ctl.fd >= 0 && read(s->ctl.fd, &c, 1) == 1) {
        if (c != '\n') { if (s->code_len < sizeof s->code - 1) s->code[s->code_len++] = c; continue; }
        s->code[s->code_len] = 0;
        s->code_len = 0;
        if (s->busy) action_done(s, s->flags & F_TIMED_OUT ? 124 : atoi(s->code));
    }
}

static void overdue(struct session *s) {
    s->flags |= F_TIMED_OUT;
    s->deadline = now_ms() + KILL_ROUND_MS;
    /* Children first: a shell that only waits goes on and keeps its state. A shell that is itself the loop must die. */
    kill_action(s);
    if (++s->rounds > KILL_ROUNDS && s->shell) kill(s->shell, SIGKILL);
}

static int open_streams(struct session *s) {
    for (int i = 0; i < 2; i++) {
        int p[2];
        s->out[i] = NULL;
        if (pipe2(p, O_CLOEXEC)) {
            if (i) { unwatch(s->out[0]); free(s->out[0]); close(s->writer[0]); }
            return -1;
        }
        if (!(s->out[i] = malloc(sizeof(struct watch)))) die("out of memory");
        fcntl(p[0], F_SETFL, O_NONBLOCK);
        s->writer[i] = p[1];
        watch_fd(s->out[i], p[0], i ? W_ERR : W_OUT, s, EPOLLIN);
    }
    return 0;
}

/* eval in the session's own shell keeps variables, directory and jobs. The streams are opened by path, so that each
   action has its own; the result descriptor is hidden from what the action starts. */
static void write_script(struct session *s, const uint8_t *command, size_t n) {
    char tail[160];
    put(&s->pending, "eval '", 6);
    for (size_t i = 0; i < n; i++) {
        if (command[i] == '\'') put(&s->pending, "'\\''", 4);
        else if (command[i]) put(&s->pending, command + i, 1);
    }
    int len = snprintf(tail, sizeof tail, "' </dev/null >/proc/1/fd/%d 2>/proc/1/fd/%d %d>&-\necho $? >&%d\n",
                       s->writer[0], s->writer[1], CTL_FD, CTL_FD);
    put(&s->pending, tail, len);
    feed_shell(s);
}

static void start_action(struct conn *c, const uint8_t *p, size_t n) {
    uint32_t id, timeout;
    struct session *s;
    if (n < 20) { refuse(c, "short action request"); return; }
    memcpy(&id, p, 4);
    if (id >= MAX_SESSIONS) { refuse(c, "no such session"); return; }
    s = &sessions[id];
    if (s->busy) { refuse(c, "busy: an action is in flight"); return; }
    if (!s->used) { s->id = id; s->used = 1; s->in.fd = s->ctl.fd = -1; }
    if (open_streams(s)) { refuse(c, "no pipe for the action: too many open descriptors"); return; }
    memcpy(&s->action, p + 4, 8); memcpy(&timeout, p + 12, 4); memcpy(&s->limit, p + 16, 4);
    s->before_n = list_pids(s->before, MAX_PIDS);
    if (!s->shell) start_shell(s);
    s->started = now_ms();
    s->deadline = timeout ? s->started + timeout : 0;
    s->flags = s->rounds = s->sent[0] = s->sent[1] = 0;
    s->total[0] = s->total[1] = 0;
    s->code_len = 0;
    s->busy = 1;
    s->conn = c;
    c->session = s;
    write_script(s, p + 20, n - 20);
}

/* ---- requests ---- */

static void answer_ping(struct conn *c) {
    uint8_t r[20];
    uint32_t v = PROTOCOL, used = 0, busy = 0;
    for (int i = 0; i < MAX_SESSIONS; i++) { used += sessions[i].used; busy += sessions[i].busy; }
    memcpy(r, &v, 4); memcpy(r + 4, &used, 4); memcpy(r + 8, &busy, 4); memcpy(r + 12, &last_done, 8);
    frame(c, 'p', r, sizeof r);
    finish(c);
}

static void request(struct conn *c, uint8_t kind, const uint8_t *body, size_t n) {
    switch (kind) {
    case 'P': answer_ping(c); break;
    case 'N':
        if (n == 0 || n > sizeof nonce) { refuse(c, "bad nonce length"); break; }
        memcpy(nonce, body, n);
        nonce_len = n;
        frame(c, 'k', "", 0);
        finish(c);
        break;
    case 'Q': frame(c, 'n', nonce, nonce_len); finish(c); break;
    case 'X': start_action(c, body, n); break;
    default: refuse(c, "unknown request");
    }
}

static void read_conn(struct conn *c) {
    uint8_t chunk[65536];
    for (;;) {
        ssize_t n = recv(c->w.fd, chunk, sizeof chunk, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) { end_conn(c); return; }
        if (c->session || c->closing) continue;             /* one request per connection: the rest is ignored */
        put(&c->in, chunk, n);
        if (c->in.len < 5) continue;
        uint32_t len;
        memcpy(&len, c->in.data, 4);
        if (len == 0 || len > MAX_REQUEST) { refuse(c, "bad request length"); return; }
        if (c->in.len >= 4 + (size_t)len) { request(c, c->in.data[4], c->in.data + 5, len - 1); return; }
    }
}

static void accept_conn(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct ucred peer;
    socklen_t size = sizeof peer;
    struct conn *c;
    if (fd < 0) return;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.pid != 0 || !(c = calloc(1, sizeof *c))) { close(fd); return; }
    watch_fd(&c->w, fd, W_CONN, c, EPOLLIN);
}

static void reap(int sigfd) {
    struct signalfd_siginfo info;
    int status;
    pid_t pid;
    while (read(sigfd, &info, sizeof info) == sizeof info)
        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) _exit(0);
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < MAX_SESSIONS; i++) {
            struct session *s = &sessions[i];
            if (!s->used || s->shell != pid) continue;
            read_ctl(s);                                    /* its last result may still be in the pipe */
            shell_ended(s, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
}

static void handle(struct watch *w, uint32_t events) {
    struct session *s = w->owner;
    struct conn *c = w->owner;
    if (w->fd < 0) return;
    switch (w->kind) {
    case W_SIGNAL: reap(w->fd); break;
    case W_LISTEN: accept_conn(w->fd); break;
    case W_CONN:
        if (events & EPOLLOUT) flush_conn(c);
        if (c->w.fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_conn(c);
        break;
    case W_SHELL_IN: if (events & EPOLLOUT) feed_shell(s); else rearm(w, 0); break;
    case W_CTL: read_ctl(s); if (events & EPOLLHUP && w->fd >= 0) epoll_ctl(ep, EPOLL_CTL_DEL, w->fd, NULL); break;
    case W_OUT: take_output(s, 0); break;
    case W_ERR: take_output(s, 1); break;
    case W_LEFTOVER: take_leftover(w); break;
    }
}

static int next_timeout(void) {
    uint64_t now = now_ms(), least = UINT64_MAX;
    for (int i = 0; i < MAX_SESSIONS; i++) {
        struct session *s = &sessions[i];
        if (!s->busy || !s->deadline) continue;
        if (s->deadline <= now) overdue(s);
        if (s->deadline < least) least = s->deadline;
    }
    return least == UINT64_MAX ? -1 : least <= now ? 0 : (int)(least - now);
}

static int listen_socket(void) {
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", SOCKET_PATH);
    mkdir("/run", 0755);
    unlink(SOCKET_PATH);
    umask(077);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 64)) die("listen on " SOCKET_PATH);
    umask(022);
    return fd;
}

int main(void) {
    static struct watch signals, listener;
    sigset_t set;
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    ep = epoll_create1(EPOLL_CLOEXEC);
    int sig = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (ep < 0 || sig < 0) die("epoll or signalfd");
    watch_fd(&signals, sig, W_SIGNAL, NULL, EPOLLIN);
    watch_fd(&listener, listen_socket(), W_LISTEN, NULL, EPOLLIN);
    for (;;) {
        struct epoll_event ev[64];
        int n = epoll_wait(ep, ev, 64, next_timeout());
        for (int i = 0; i < n; i++) handle(ev[i].data.ptr, ev[i].events);
        for (int i = 0; i < dead_n; i++) { drop(&dead_conns[i]->in); drop(&dead_conns[i]->out); free(dead_conns[i]); }
        dead_n = 0;
    }
}
