/*
 * PID 1 of every sandbox.
 *
 * Reaps orphans, keeps long-lived shells (sessions), runs actions in them or directly, and holds the nonce that proves
 * after a restore that this very memory came back. Everything an action starts is a child of this process tree, which
 * is the only thing that a process dump carries. Needs nothing of the image: no shell, no libc, no /etc.
 *
 * Talks over a unix stream socket inside the container; one connection carries one request and is closed by us after
 * the answer, so that no connection crosses a boundary (a dump refuses sockets whose peer is outside).
 * A peer is accepted only when the kernel shows its pid as 0, which means that it lives outside our pid namespace:
 * programs of the sandbox cannot drive the agent.
 *
 * Frames, little endian: u32 length of what follows, u8 kind, body. "bytes" is u32 length, data, one NUL.
 *   request  P            ping                     -> p: u32 protocol, u32 sessions, u32 busy, u64 last finished action
 *            N nonce      set the nonce            -> k
 *            Q            ask the nonce back       -> n: nonce
 *            X u64 action, u32 timeout ms (0: none), u32 cap per stream, u32 direct, u32 has input, bytes session,
 *              bytes command (direct: arguments that end in NUL), bytes env ("K=V" NUL ...), bytes cwd, bytes user,
 *              bytes input                         -> o / e chunks as they come, O / E tails, then
 *                                                     r: i32 code, u32 signal, u32 flags, u32 ms, u64 stdout bytes,
 *                                                        u64 stderr bytes, u64 user us, u64 system us, u64 max rss KiB
 *            K u64 action end it now               -> k (the action's own connection gets its r)
 *            W, D, R      files: see files.c
 *   error    !: text      nothing was begun
 */
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
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

int ep;
uint64_t last_done;
struct session sessions[MAX_SESSIONS];
struct act acts[MAX_SESSIONS];
static uint8_t nonce[64];
static size_t nonce_len;

void die(const char *what) {
    dprintf(2, "belayer-agent: %s: %s\n", what, strerror(errno));
    _exit(70);
}

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void watch_fd(struct watch *w, int fd, enum kind kind, void *owner, uint32_t events) {
    struct epoll_event e = { .events = events, .data.ptr = w };
    w->fd = fd; w->kind = kind; w->owner = owner;
    if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)) die("epoll add");
}

void rearm(struct watch *w, uint32_t events) {
    struct epoll_event e = { .events = events, .data.ptr = w };
    epoll_ctl(ep, EPOLL_CTL_MOD, w->fd, &e);
}

void unwatch(struct watch *w) {
    if (w->fd < 0) return;
    epoll_ctl(ep, EPOLL_CTL_DEL, w->fd, NULL);
    close(w->fd);
    w->fd = -1;
}

void forget_nonce(void) { memset(nonce, 0, sizeof nonce); }

/* ---- requests ---- */

static void answer_ping(struct conn *c) {
    uint8_t r[20];
    uint32_t v = PROTOCOL, shells = 0, busy = 0;
    for (int i = 0; i < MAX_SESSIONS; i++) { shells += sessions[i].shell != 0; busy += acts[i].used; }
    memcpy(r, &v, 4); memcpy(r + 4, &shells, 4); memcpy(r + 8, &busy, 4); memcpy(r + 12, &last_done, 8);
    frame(c, 'p', r, sizeof r);
    finish(c);
}

static void request(struct conn *c, uint8_t kind, uint8_t *body, size_t n) {
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
    case 'K': stop_action(c, body, n); break;
    case 'W': write_file(c, body, n); break;
    case 'D': make_folder(c, body, n); break;
    case 'R': read_path(c, body, n); break;
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
        if (c->act || c->closing) continue;                 /* one request per connection: the rest is ignored */
        put(&c->in, chunk, n);
        if (c->in.len < 5) continue;
        uint32_t len;
        memcpy(&len, c->in.data, 4);
        if (len == 0 || len > MAX_REQUEST) { refuse(c, "bad request length"); return; }
        if (c->in.len >= 4 + (size_t)len) {
            request(c, c->in.data[4], c->in.data + 5, len - 1);
            drop(&c->in);                                   /* an action may take long, its request may be large */
            return;
        }
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

/* ---- processes ---- */

static void ended(pid_t pid, int status, const struct rusage *used) {
    for (int i = 0; i < MAX_SESSIONS; i++) {
        struct session *s = &sessions[i];
        struct act *a = &acts[i];
        if (s->shell == pid) {
            read_ctl(s);                                    /* its last result may still be in the pipe */
            if (s->act) usage_of(s->act, used);
            shell_ended(s, status);
            return;
        }
        if (!a->used || a->session || a->pid != pid) continue;
        usage_of(a, used);
        if (WIFEXITED(status)) act_ended(a, WEXITSTATUS(status), 0);
        else act_ended(a, 128 + WTERMSIG(status), WTERMSIG(status));
        return;
    }
}

static void reap(int sigfd) {
    struct signalfd_siginfo info;
    struct rusage used;
    int status;
    pid_t pid;
    /* Only for who is outside, whose pid is 0 here: what runs inside must not be able to end its sandbox, and cannot
       claim SI_USER with another's pid (rt_sigqueueinfo(2)). */
    while (read(sigfd, &info, sizeof info) == sizeof info)
        if ((info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) && info.ssi_code == SI_USER && !info.ssi_pid) _exit(0);
    while ((pid = wait4(-1, &status, WNOHANG, &used)) > 0) ended(pid, status, &used);
}

/* ---- the loop ---- */

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
    case W_OUT: take_output(w->owner, 0); break;
    case W_ERR: take_output(w->owner, 1); break;
    case W_LEFTOVER: take_leftover(w); break;
    }
}

static int next_timeout(void) {
    uint64_t now = now_ms(), least = UINT64_MAX;
    for (int i = 0; i < MAX_SESSIONS; i++) {
        struct act *a = &acts[i];
        if (!a->used || !a->deadline) continue;
        if (a->deadline <= now) press_on(a);
        if (a->used && a->deadline < least) least = a->deadline;
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

/* `agent hold`: PID 1 of a container that only keeps a network namespace. */
static void hold(void) {
    sigset_t set;
    int sig;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    sigwait(&set, &sig);
    _exit(0);
}

int main(int argc, char **argv) {
    static struct watch signals, listener;
    sigset_t set;
    if (argc > 1 && strcmp(argv[1], "hold") == 0) hold();
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
        bury_conns();
    }
}
