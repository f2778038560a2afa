/* The floor below every proxy: for each request the system calls that none can do without, and hardly anything else.

   floor port=P prefill_port=P decode_port=D

   Reads the request, writes it as a prefill leg, reads the reply, writes the decode leg with the handoff of that reply,
   and passes on what comes, one read and one write at a time. Connections to engines are kept and used again. There is
   no admission, no limit, no retry, no metric and no second engine, and nothing is checked: it serves the benchmark's
   own engines and clients, and nobody else. */
#include "json.h"
#include <signal.h>

#define READ_BYTES (256 * 1024)
#define CHUNKED -2
#define END "\r\n0\r\n\r\n"
#define END_BYTES (sizeof END - 1)

enum role { CLIENT, PREFILLER, DECODER };

/* A connection. While a request is under way, `other` is the client's leg, and the leg's client. */
struct link {
    int fd;
    enum role role;
    bool is_watching_out, is_paused, is_dead;
    struct link *other, *next;  /* next: among those of its role that are idle, or dead */
    struct bytes in, out;       /* of a client: its request; what its socket has not taken of the answer */
    struct bytes front, handoff;
    struct iovec parts[3];      /* of a leg: what is yet to be written */
    int num_parts;
    long left;                  /* of an answer: bytes yet to come; CHUNKED; -1: its head has not come */
    char tail[END_BYTES];       /* of an answer in chunks: its last bytes so far */
};

static int poller;
static long engine_ports[3];
static struct link *idle[3], *dead;

static struct link *open_link(int fd, enum role role) {
    struct link *link = calloc(1, sizeof *link);
    if (!link) die("out of memory");
    set_no_delay(fd);
    *link = (struct link){.fd = fd, .role = role, .left = -1};
    watch(poller, fd, EPOLLIN, link, EPOLL_CTL_ADD);
    return link;
}

static struct link *engine_link(enum role role) {
    struct link *link = idle[role];
    if (link) {
        idle[role] = link->next;
        return link;
    }
    struct sockaddr_in address = loopback(engine_ports[role]);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("port %ld: %s", engine_ports[role], strerror(errno));
    return open_link(fd, role);
}

static void watch_for(struct link *link) {
    uint32_t events = (link->is_paused ? 0 : EPOLLIN) | (link->is_watching_out ? EPOLLOUT : 0);
    watch(poller, link->fd, events, link, EPOLL_CTL_MOD);
}

/* Whoever is at the other end of a request goes with it. */
static void drop(struct link *link) {
    if (link->is_dead) return;
    for (struct link **at = &idle[link->role]; *at; at = &(*at)->next) {
        if (*at != link) continue;
        *at = link->next;
        break;
    }
    link->is_dead = true;
    close(link->fd);
    link->next = dead;
    dead = link;
    if (!link->other) return;
    link->other->other = NULL;
    drop(link->other);
}

static void free_dead(void) {
    while (dead) {
        struct link *link = dead;
        dead = link->next;
        release(&link->in);
        release(&link->out);
        release(&link->front);
        release(&link->handoff);
        free(link);
    }
}

/* ── legs ── */

static void push(struct link *leg) {
    bool is_full = send_parts(leg->fd, leg->parts, &leg->num_parts);
    if (is_full == leg->is_watching_out) return;
    leg->is_watching_out = is_full;
    watch_for(leg);
}

/* The client's body, with `more` before its last brace. */
static void send_leg(struct link *client, enum role role, const char *more, size_t size) {
    struct head head = {0};
    read_head(client->in.data, client->in.size, &head);
    struct link *leg = engine_link(role);
    size_t line = (size_t)((char *)memchr(client->in.data, '\n', head.size) - client->in.data) + 1;
    char fields[128];
    int length = snprintf(fields, sizeof fields, "host: 127.0.0.1\r\ncontent-type: application/json\r\n"
                          "content-length: %zu\r\n\r\n", (size_t)head.length + size);
    leg->front.size = 0;
    append(&leg->front, client->in.data, line);
    append(&leg->front, fields, (size_t)length);
    leg->other = client, client->other = leg;
    leg->in.size = 0, leg->left = -1;
    leg->parts[0] = (struct iovec){leg->front.data, leg->front.size};
    leg->parts[1] = (struct iovec){client->in.data + head.size, (size_t)head.length - 1};
    leg->parts[2] = (struct iovec){(char *)more, size + 1};
    leg->num_parts = 3;
    push(leg);
}

static void end_leg(struct link *leg) {
    leg->other->other = NULL;
    leg->other = NULL;
    leg->next = idle[leg->role];
    idle[leg->role] = leg;
}

/* Where the whole reply has come, the decode leg follows. */
static void take_reply(struct link *leg) {
    struct link *client = leg->other;
    struct head head;
    if (!read_head(leg->in.data, leg->in.size, &head) || leg->in.size < head.size + (size_t)head.length) return;
    const char *end = leg->in.data + leg->in.size;
    const char *params = value_of(leg->in.data + head.size, end, "\"kv_transfer_params\"");
    const char *params_end = object_end(params, end);
    if (!params_end) {
        drop(leg);
        return;
    }
    client->handoff.size = 0;
    append(&client->handoff, ",\"kv_transfer_params\":", 22);
    append(&client->handoff, params, (size_t)(params_end - params));
    append(&client->handoff, "}", 1);
    end_leg(leg);
    send_leg(client, DECODER, client->handoff.data, client->handoff.size - 1);
}

/* ── the answer ── */

static bool ends_here(struct link *leg, const char *data, size_t size) {
    struct head head;
    if (leg->left == -1) {
        if (!read_head(data, size, &head)) die("an answer's head came in pieces");
        leg->left = head.is_chunked ? CHUNKED : head.length + (long)head.size;
        memset(leg->tail, 0, END_BYTES);
    }
    if (leg->left != CHUNKED) return (leg->left -= (long)size) <= 0;
    size_t fresh = size < END_BYTES ? size : END_BYTES;
    memmove(leg->tail, leg->tail + fresh, END_BYTES - fresh);
    memcpy(leg->tail + END_BYTES - fresh, data + size - fresh, fresh);
    return memcmp(leg->tail, END, END_BYTES) == 0;
}

static void pass_on(struct link *leg, const char *data, size_t size) {
    struct link *client = leg->other;
    ssize_t sent = client->out.size ? 0 : send(client->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN) {
        drop(leg);
        return;
    }
    if (sent < 0) sent = 0;
    if ((size_t)sent < size) {
        append(&client->out, data + sent, size - (size_t)sent);
        if (!client->is_watching_out) client->is_watching_out = true, watch_for(client);
        if (!leg->is_paused) leg->is_paused = true, watch_for(leg);
    }
    if (!ends_here(leg, data, size)) return;
    if (leg->is_paused) leg->is_paused = false, watch_for(leg);
    end_leg(leg);
    client->in.size = 0;
}

static void go_on(struct link *client) {
    ssize_t sent = send(client->fd, client->out.data, client->out.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return;  /* reading says what has become of it */
    drop_front(&client->out, (size_t)sent);
    if (client->out.size) return;
    client->is_watching_out = false, watch_for(client);
    if (client->other && client->other->is_paused) client->other->is_paused = false, watch_for(client->other);
}

/* ── reading ── */

static void take_request(struct link *client) {
    static const char asks[] = ",\"kv_transfer_params\":{\"do_remote_decode\":true}}";
    struct head head;
    if (client->other || !read_head(client->in.data, client->in.size, &head)) return;
    if (client->in.size < head.size + (size_t)(head.length > 0 ? head.length : 0)) return;
    if (head.length > 0) send_leg(client, PREFILLER, asks, sizeof asks - 2);
    else drop(client);
}

static void hear(struct link *link) {
    static char block[READ_BYTES];
    bool is_kept = link->role != DECODER;
    if (is_kept) reserve(&link->in, link->in.room - link->in.size > 4096 ? 0 : READ_BYTES);
    char *to = is_kept ? link->in.data + link->in.size : block;
    ssize_t got = recv(link->fd, to, is_kept ? link->in.room - link->in.size : sizeof block, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        drop(link);
        return;
    }
    if (is_kept) link->in.size += (size_t)got;
    if (link->role == CLIENT) take_request(link);
    else if (!link->other) die("an engine spoke unasked");
    else if (link->role == PREFILLER) take_reply(link);
    else pass_on(link, block, (size_t)got);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    int listener = listen_on(loopback(number(argc, argv, "port", 0)));
    engine_ports[PREFILLER] = number(argc, argv, "prefill_port", 0);
    engine_ports[DECODER] = number(argc, argv, "decode_port", 0);
    poller = epoll_create1(EPOLL_CLOEXEC);
    watch(poller, listener, EPOLLIN, NULL, EPOLL_CTL_ADD);
    struct epoll_event events[MAX_EVENTS];
    for (;;) {
        int count = epoll_wait(poller, events, MAX_EVENTS, -1);
        for (int i = 0; i < count; i++) {
            struct link *link = events[i].data.ptr;
            int fd;
            if (!link)
                while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) open_link(fd, CLIENT);
            if (!link || link->is_dead) continue;
            if (events[i].events & EPOLLOUT) link->role == CLIENT ? go_on(link) : push(link);
            if (!link->is_dead && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(link);
        }
        free_dead();
    }
}
