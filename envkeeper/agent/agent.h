/*
 * PID 1 of every sandbox: shared declarations. main.c says what it is for and how it is talked to.
 */
#ifndef BELAYER_AGENT_H
#define BELAYER_AGENT_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#define PROTOCOL 2
#define SOCKET_PATH "/run/belayer-agent.sock"
#define MAX_REQUEST (12u << 20)
#define MAX_SESSIONS 16
#define MAX_NAME 32
#define CTL_FD 9

enum { F_TIMED_OUT = 1, F_SHELL_ENDED = 2, F_OUT_CUT = 4, F_ERR_CUT = 8, F_STOPPED = 16, F_UNKILLED = 32 };
enum kind { W_SIGNAL, W_LISTEN, W_CONN, W_SHELL_IN, W_CTL, W_OUT, W_ERR, W_LEFTOVER };

struct buf { uint8_t *data; size_t len, cap, off; };
struct watch { int fd; enum kind kind; void *owner; };

struct act;

struct conn {
    struct watch w;
    struct buf in, out;
    struct act *act;                    /* set while its action runs */
    int closing;                        /* 1: after the answer is out, 2: closed */
};

/* One long-lived shell. Its slot is free again when the shell has ended. */
struct session {
    char name[MAX_NAME + 1];
    pid_t shell;
    uid_t uid;
    char user[MAX_NAME * 2 + 2];
    char cwd[4096];                     /* where a shell that replaces a killed one starts */
    struct watch in, ctl;
    struct buf pending;                 /* script not yet taken by the shell */
    struct act *act;
    char line[128]; size_t line_len;
    int code, have_code;
    uint64_t seen_us[2];                /* user, system: what `times` said at the last action */
    uint64_t last_used;
};

/* One stream of an action: the first half of the cap is sent as it comes, of the rest the last half is kept. */
struct stream {
    struct watch *out;
    int writer;                         /* kept open while the action runs, so that the stream never ends early */
    uint64_t total;
    uint32_t sent;
    uint8_t *tail; uint32_t tail_len, tail_at;
};

struct act {
    int used, ending, reaped, rounds;
    struct conn *conn;                  /* NULL: its client went away */
    struct session *session;            /* NULL: run directly */
    pid_t pid, usher;
    uint64_t number, started, deadline;
    uint32_t flags, head, tail_cap;
    int code, signal, input;
    uint64_t used_us[2]; long max_rss;
    struct stream stream[2];
};

/* What an action request asks for; pointers go into the request. */
struct ask {
    uint64_t number;
    uint32_t timeout, cap, direct;
    char *session, *command, *cwd, *user;
    char *env; uint32_t env_len, command_len;   /* strings that end in NUL, one after the other */
    uint8_t *input; uint32_t input_len; int has_input;
};

struct who { uid_t uid; gid_t gid, groups[64]; int n_groups; char name[64], home[512]; };

/* main.c */
extern int ep;
extern uint64_t last_done;
extern struct session sessions[MAX_SESSIONS];
extern struct act acts[MAX_SESSIONS];
void die(const char *what) __attribute__((noreturn));
uint64_t now_ms(void);
void watch_fd(struct watch *w, int fd, enum kind kind, void *owner, uint32_t events);
void rearm(struct watch *w, uint32_t events);
void unwatch(struct watch *w);
void forget_nonce(void);

/* conn.c */
void put(struct buf *b, const void *p, size_t n);
void drop(struct buf *b);
void frame(struct conn *c, uint8_t kind, const void *body, size_t n);
void flush_conn(struct conn *c);
void finish(struct conn *c);
void end_conn(struct conn *c);
void refuse(struct conn *c, const char *why);
void bury_conns(void);

/* proc.c */
void expendable(void);
int mark(pid_t pid, uint64_t number);
int kill_marked(uint64_t number);

/* user.c */
const char *find_user(const char *spec, struct who *w);
int become(const struct who *w);
char **environment(const struct who *w, const char *extra, uint32_t extra_len);

/* session.c */
struct session *session_for(const char *name, const char **why);
const char *open_session(struct session *s, const struct who *w, const char *user, uint64_t number);
void tell_shell(struct session *s, const struct act *a, const struct ask *q);
void feed_shell(struct session *s);
void read_ctl(struct session *s);
void shell_ended(struct session *s, int status);

/* act.c */
void start_action(struct conn *c, uint8_t *body, size_t n);
void stop_action(struct conn *c, const uint8_t *body, size_t n);
void take_output(struct act *a, int which);
void take_leftover(struct watch *w);
void act_ended(struct act *a, int code, int signal);
void usage_of(struct act *a, const struct rusage *used);
void press_on(struct act *a);

/* files.c */
void write_file(struct conn *c, const uint8_t *body, size_t n);
void make_folder(struct conn *c, const uint8_t *body, size_t n);
void read_path(struct conn *c, const uint8_t *body, size_t n);

/* cursor over a request body */
struct cursor { uint8_t *p; size_t left; int bad; };
uint32_t take_u32(struct cursor *k);
uint64_t take_u64(struct cursor *k);
uint8_t *take_bytes(struct cursor *k, uint32_t *n);     /* u32 length, bytes, and a NUL that is not counted */
#endif
