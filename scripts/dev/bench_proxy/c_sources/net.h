/* What the two helpers share: a clock, sockets, growing buffers and HTTP/1.1 heads. Linux only. */
#ifndef PDPROXY_BENCH_NET_H
#define PDPROXY_BENCH_NET_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define MAX_EVENTS 512

/* A token's text is this mark and STAMP_DIGITS digits: the monotonic clock, in ns, when the engine wrote it. */
#define MARK '@'
#define STAMP_DIGITS 19

/* Of several models the first one is "bench", too. */
#define MODEL_BYTES 32
static inline void write_model(char *name, long number) {
    snprintf(name, MODEL_BYTES, number ? "bench-%ld" : "bench", number);
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static inline void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* ── command lines of name=value ── */

static inline const char *option(int argc, char **argv, const char *name, const char *otherwise) {
    size_t length = strlen(name);
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, length) == 0 && argv[i][length] == '=') return argv[i] + length + 1;
    return otherwise;
}

static inline long number(int argc, char **argv, const char *name, long otherwise) {
    const char *text = option(argc, argv, name, NULL);
    return text ? atol(text) : otherwise;
}

/* ── buffers: `size` bytes are filled of `room` ── */

struct bytes {
    char *data;
    size_t size, room;
};

static inline void reserve(struct bytes *buffer, size_t more) {
    if (buffer->size + more <= buffer->room) return;
    size_t room = buffer->room ? buffer->room : 1024;
    while (room < buffer->size + more) room *= 2;
    buffer->data = realloc(buffer->data, room);
    if (!buffer->data) die("out of memory");
    buffer->room = room;
}

static inline void append(struct bytes *buffer, const void *data, size_t size) {
    reserve(buffer, size);
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

static inline void drop_front(struct bytes *buffer, size_t size) {
    buffer->size -= size;
    if (buffer->size) memmove(buffer->data, buffer->data + size, buffer->size);
}

static inline void release(struct bytes *buffer) {
    free(buffer->data);
    *buffer = (struct bytes){0};
}

/* ── sockets ── */

static inline void set_no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline struct sockaddr_in loopback(long port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

/* The one of this number of the addresses that this machine has for itself alone; 0 is the usual one. */
static inline struct sockaddr_in loopback_at(long number, long port) {
    struct sockaddr_in address = loopback(port);
    if (number) address.sin_addr.s_addr = htonl(0x7f4d0000u + (uint32_t)number);  /* 127.77.0.0 */
    return address;
}

static inline int listen_on(struct sockaddr_in address) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0)
        die("port %d: %s", ntohs(address.sin_port), strerror(errno));
    return fd;
}

/* Sends of `parts` what the socket takes, and drops that from them. True where some are left. A socket that is broken
   takes all: reading says what has become of it. */
static inline bool send_parts(int fd, struct iovec *parts, int *num_parts) {
    while (*num_parts) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)*num_parts};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EAGAIN) return true;
        if (sent < 0) *num_parts = 0;
        while (sent > 0) {
            size_t step = (size_t)sent < parts[0].iov_len ? (size_t)sent : parts[0].iov_len;
            parts[0].iov_base = (char *)parts[0].iov_base + step;
            parts[0].iov_len -= step;
            sent -= (ssize_t)step;
            if (parts[0].iov_len) break;
            memmove(parts, parts + 1, (size_t)--*num_parts * sizeof *parts);
        }
    }
    return false;
}

static inline void watch(int poll, int fd, uint32_t events, void *owner, int how) {
    struct epoll_event event = {.events = events, .data.ptr = owner};
    if (epoll_ctl(poll, how, fd, &event) < 0) die("epoll_ctl: %s", strerror(errno));
}

/* ── heads ── */

struct head {
    size_t size;    /* bytes up to and with the empty line */
    long length;    /* content-length; -1: none was told */
    bool is_chunked;
};

/* False while the empty line is not there. */
static inline bool read_head(const char *data, size_t size, struct head *head) {
    const char *end = memmem(data, size, "\r\n\r\n", 4);
    if (!end) return false;
    *head = (struct head){.size = (size_t)(end - data) + 4, .length = -1};
    for (const char *line = data; line < end;) {
        const char *next = memmem(line, (size_t)(end + 2 - line), "\r\n", 2);
        if (strncasecmp(line, "content-length:", 15) == 0) head->length = atol(line + 15);
        if (strncasecmp(line, "transfer-encoding:", 18) == 0) head->is_chunked = true;
        line = next + 2;
    }
    return true;
}

#endif
