/* Connections: one request, its answer, and closed by us. */
#include "agent.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static struct conn *dead[256];          /* freed after the current batch of events, which may still name them */
static int dead_n;

void put(struct buf *b, const void *p, size_t n) {
    if (b->len + n > b->cap) {
        b->cap = (b->len + n) * 2 + 256;
        b->data = realloc(b->data, b->cap);
        if (!b->data) die("out of memory");
    }
    memcpy(b->data + b->len, p, n);
    b->len += n;
}

void drop(struct buf *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

void frame(struct conn *c, uint8_t kind, const void *body, size_t n) {
    uint32_t len = (uint32_t)n + 1;
    if (!c || c->closing == 2) return;
    put(&c->out, &len, 4);
    put(&c->out, &kind, 1);
    put(&c->out, body, n);
}

void end_conn(struct conn *c) {
    if (c->closing == 2) return;
    if (c->act) { c->act->conn = NULL; c->act = NULL; }
    c->closing = 2;
    unwatch(&c->w);
    if (dead_n < 256) dead[dead_n++] = c;                   /* beyond that it leaks, which is better than a dangling event */
}

void bury_conns(void) {
    for (int i = 0; i < dead_n; i++) {
        drop(&dead[i]->in);
        drop(&dead[i]->out);
        free(dead[i]);
    }
    dead_n = 0;
}

void finish(struct conn *c) {
    if (c && c->closing == 0) { c->closing = 1; flush_conn(c); }
}

void refuse(struct conn *c, const char *why) {
    frame(c, '!', why, strlen(why));
    finish(c);
}

void flush_conn(struct conn *c) {
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

uint32_t take_u32(struct cursor *k) {
    uint32_t v = 0;
    if (k->left < 4) { k->bad = 1; return 0; }
    memcpy(&v, k->p, 4);
    k->p += 4; k->left -= 4;
    return v;
}

uint64_t take_u64(struct cursor *k) {
    uint64_t low = take_u32(k), high = take_u32(k);
    return low | high << 32;
}

uint8_t *take_bytes(struct cursor *k, uint32_t *n) {
    static uint8_t nothing[1];
    uint32_t len = take_u32(k);
    uint8_t *at = k->p;
    if (k->bad || k->left < (size_t)len + 1 || at[len] != 0) { k->bad = 1; *n = 0; return nothing; }
    k->p += len + 1; k->left -= (size_t)len + 1;
    *n = len;
    return at;
}
