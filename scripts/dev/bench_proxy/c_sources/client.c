/* Many clients in one process: closed loops of requests, each of which sends its next when the last is answered.

   client port=P [decode_port=D] clients=C requests=K warmup=W tokens=N stream=0|1 chat=0|1 prompt_bytes=B spread_ms=S
          models=M headers=H hold=0|1 stay=0|1 slow=0|1 marks=M beside=E beside_pause_ms=T beside_file=FILE

   With `decode_port` there is no proxy between: a client does both legs itself. Everybody connects, `warmup` requests
   are made, and "ready" is printed; at a line of input the `requests` are made, the clients' first ones spread over
   `spread_ms`, "mark" is printed after every part of them if there are to be `marks` parts, and "done" at their end; at
   the next line of input, one line of JSON with what was timed, in tenths of a µs.
   With `hold` "done" comes when every client has its first token, and at the end they all leave.
   With `stay` all clients begin, however few `requests` there are, and all go on after "done": each line of input has
   what was timed since the one before it told, until the input ends. With `slow` as well, each client reads no
   more than a byte a second after its first token, through a connection that holds as little as one to a far machine.
   There are `models` names, which take turns, and `headers` more lines in each head.
   While the requests last, `beside` more clients send the lines of a file, which are prompts in JSON without their
   quotes, each again `beside_pause_ms` after its answer. Nothing of theirs is timed. */
#include "json.h"

#define READ_BYTES (256 * 1024)
#define FRONT_BYTES 512
#define WARM_TOKENS 2
#define BESIDE_TOKENS 2
#define MAX_COMPLAINT 200
#define UNIT_NS 100
#define NS_PER_MS 1000000
/* So many connections are made at a time, and then there is a pause: nobody's backlog overflows. */
#define CONNECTS 64
#define CONNECT_PAUSE_US 10000
#define HEADER_BYTES 32
/* Slow readers take a byte a second, not all at the same time. */
#define SIPS 100
#define SIP_NS (NS_PER_S / SIPS)
/* What a slow client's connection holds, in bytes, and its largest packet. */
#define SLOW_BUFFER 4096
#define SLOW_PACKET 1448

/* ── what is sent: front (head and the beginning of the prompt, which is never the same), rest, and, of a decode leg
   that we make ourselves, the handoff ── */

struct body {
    struct bytes whole, prefill;
};
static struct body bodies[2];   /* by whether it counts (1) or warms up (0) */
static struct body *beside;     /* prompts of those beside */
static size_t num_beside_bodies;

enum part { HEAD, SIZED, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER };

struct link {
    int fd;
    struct client *client;
    /* sending */
    struct iovec parts[3];
    int num_parts;
    bool is_watching_out;
    /* reading: `head` until it is whole, then `left` bytes of a body or of a chunk */
    enum part part;
    struct bytes head;
    long left;
    bool is_line_empty, has_size;   /* of the line that is being read: nothing is in it yet; its number is over */
    int status;
};

struct client {
    struct link links[2];       /* to the proxy; or to the prefiller and the decoder */
    char *front[2];
    struct bytes reply;         /* of a prefill leg */
    struct bytes handoff;
    const struct body *body;
    bool is_waiting, is_prefill, counts, is_beside;
    uint64_t sent, due;         /* due: when one beside sends again */
    long num_tokens;
    char stamp[STAMP_DIGITS];   /* digits of a token's time that has not come whole */
    int num_digits;             /* -1: not within one */
};

static int poller;
static long port, decode_port, num_clients, num_requests, num_tokens, spread_ms, num_marks, num_beside, beside_pause_ms;
static long num_models;
static bool is_stream, is_chat, is_hold, is_staying, is_slow;
static bool is_told;            /* there is a line of input */
static struct bytes headers;
static struct client *clients;  /* those beside are behind the others */

static long num_sent, num_over, num_first, serial;
static bool is_counting;
static long num_wanted;         /* requests of this phase */
static long num_forgotten;      /* requests that were over before what is told */
static long num_beside_open, num_beside_over;

static uint32_t *first_tokens, *transits;
static size_t num_transits, room_transits;
static long num_errors;
static uint64_t sum_tokens;
static char complaint[MAX_COMPLAINT + 1];

static void begin(struct client *client);

/* ── what is counted ── */

static uint32_t units(uint64_t ns) {
    uint64_t tenths = ns / UNIT_NS;
    return tenths > UINT32_MAX ? UINT32_MAX : (uint32_t)tenths;
}

static void note_transit(uint64_t ns) {
    if (num_transits == room_transits) {
        room_transits = room_transits ? 2 * room_transits : 1 << 16;
        transits = realloc(transits, room_transits * sizeof *transits);
        if (!transits) die("out of memory");
    }
    transits[num_transits++] = units(ns);
}

/* The first one is kept. */
static void complain(const char *what, const char *detail, size_t size) {
    if (num_errors++) return;
    int length = snprintf(complaint, sizeof complaint, "%s ", what);
    for (size_t i = 0; i < size && length < MAX_COMPLAINT; i++)
        complaint[length++] = (detail[i] < ' ' || detail[i] == '"' || detail[i] == '\\') ? ' ' : detail[i];
    complaint[length] = '\0';
}

static void note_token(struct client *client, uint64_t now) {
    uint64_t written = 0;
    for (int i = 0; i < STAMP_DIGITS; i++) written = 10 * written + (uint64_t)(client->stamp[i] - '0');
    client->num_tokens++;
    if (client->is_beside) return;
    if (client->num_tokens == 1) num_first++;
    if (!client->counts) return;
    sum_tokens++;
    if (client->num_tokens == 1 && num_first <= num_requests) first_tokens[num_first - 1] = units(now - client->sent);
    note_transit(now > written ? now - written : 0);
}

static void scan(struct client *client, const char *data, size_t size, uint64_t now) {
    const char *end = data + size;
    while (data < end) {
        if (client->num_digits < 0) {
            const char *mark = memchr(data, MARK, (size_t)(end - data));
            if (!mark) return;
            data = mark + 1;
            client->num_digits = 0;
            continue;
        }
        client->stamp[client->num_digits++] = *data++;
        if (client->num_digits < STAMP_DIGITS) continue;
        note_token(client, now);
        client->num_digits = -1;
    }
}

/* ── links ── */

static void connect_link(struct link *link, long to) {
    struct sockaddr_in address = loopback(to);
    link->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (is_slow) {
        int buffer = SLOW_BUFFER, packet = SLOW_PACKET;
        setsockopt(link->fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
        setsockopt(link->fd, IPPROTO_TCP, TCP_MAXSEG, &packet, sizeof packet);
    }
    if (link->fd < 0 || connect(link->fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("port %ld: %s", to, strerror(errno));
    set_no_delay(link->fd);
    link->part = HEAD;
    link->head.size = 0;
    link->num_parts = 0;
    link->is_watching_out = false;
    watch(poller, link->fd, EPOLLIN, link, EPOLL_CTL_ADD);
}

static void reconnect(struct link *link) {
    close(link->fd);
    connect_link(link, link == &link->client->links[1] ? decode_port : port);
}

static void push(struct link *link) {
    bool is_full = send_parts(link->fd, link->parts, &link->num_parts);
    if (is_full == link->is_watching_out) return;
    link->is_watching_out = is_full;
    watch(poller, link->fd, EPOLLIN | (is_full ? EPOLLOUT : 0), link, EPOLL_CTL_MOD);
}

/* ── requests ── */

static void post(struct client *client, struct link *link, const struct bytes *middle, const struct bytes *tail) {
    static const char text[] = "{\"model\":\"%s\",\"prompt\":\"%012ld ";
    static const char chat[] = "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"%012ld ";
    char opening[128], model[MODEL_BYTES];
    write_model(model, serial % num_models);
    int length = snprintf(opening, sizeof opening, is_chat ? chat : text, model, serial);
    size_t size = (size_t)length + middle->size + (tail ? tail->size : 0);
    char *front = client->front[link - client->links];
    int total = snprintf(front, FRONT_BYTES + headers.size,
                         "POST /v1/%s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%.*s"
                         "content-length: %zu\r\n\r\n%s",
                         is_chat ? "chat/completions" : "completions", (int)headers.size, headers.data, size, opening);
    link->parts[0] = (struct iovec){front, (size_t)total};
    link->parts[1] = (struct iovec){middle->data, middle->size};
    link->num_parts = 2;
    if (tail) link->parts[link->num_parts++] = (struct iovec){tail->data, tail->size};
    push(link);
}

static void begin(struct client *client) {
    serial++;
    if (client->is_beside) num_beside_open++;
    else num_sent++;
    client->is_waiting = true;
    client->counts = is_counting && !client->is_beside;
    client->body = client->is_beside ? &beside[(size_t)serial % num_beside_bodies] : &bodies[is_counting];
    client->num_tokens = 0;
    client->num_digits = -1;
    client->sent = now_ns();
    client->is_prefill = decode_port != 0;
    client->reply.size = 0;
    post(client, &client->links[0], client->is_prefill ? &client->body->prefill : &client->body->whole, NULL);
}

static void mark(void) {
    long before = (num_over - 1) * num_marks / num_wanted, now = num_over * num_marks / num_wanted;
    if (now == before) return;
    puts("mark");
    fflush(stdout);
}

static void over(struct client *client) {
    client->is_waiting = false;
    if (client->is_beside) {
        client->due = now_ns() + (uint64_t)beside_pause_ms * NS_PER_MS;
        num_beside_open--;
        num_beside_over++;
        return;
    }
    num_over++;
    if (is_counting && num_marks) mark();
    if (num_sent < num_wanted || (is_staying && is_counting)) begin(client);
}

/* The same body again, in which the handoff takes the place of the closing brace. */
static void begin_decode(struct client *client) {
    const char *end = client->reply.data + client->reply.size;
    const char *params = value_of(client->reply.data, end, "\"kv_transfer_params\"");
    const char *params_end = object_end(params, end);
    if (!params_end) {
        complain("no handoff in", client->reply.data, client->reply.size);
        over(client);
        return;
    }
    client->is_prefill = false;
    client->handoff.size = 0;
    append(&client->handoff, ",\"kv_transfer_params\":", 22);
    append(&client->handoff, params, (size_t)(params_end - params));
    append(&client->handoff, "}", 1);
    struct bytes middle = client->body->whole;
    middle.size--;
    post(client, &client->links[1], &middle, &client->handoff);
}

static void finish_reply(struct link *link) {
    struct client *client = link->client;
    link->part = HEAD;
    link->head.size = 0;
    if (!client->is_waiting) return;
    long expected = is_stream && !client->is_beside ? (client->counts ? num_tokens : WARM_TOKENS) : 1;
    if (link->status != 200) {
        char what[32];
        snprintf(what, sizeof what, "HTTP %d", link->status);
        complain(what, client->reply.data, client->reply.size);
        over(client);
    } else if (client->is_prefill) {
        begin_decode(client);
    } else {
        /* One that was put together from a stream has a mark for every token of it. */
        long streamed = client->is_beside ? BESIDE_TOKENS : client->counts ? num_tokens : WARM_TOKENS;
        bool is_whole = client->num_tokens == expected || (!is_stream && client->num_tokens == streamed);
        if (!is_whole) complain("an answer is not whole", "", 0);
        over(client);
    }
}

/* ── reading a reply, in whatever pieces it comes ── */

static void take_body(struct link *link, const char *data, size_t size, uint64_t now) {
    struct client *client = link->client;
    if (client->is_prefill || link->status != 200) append(&client->reply, data, size);
    else scan(client, data, size, now);
}

static size_t take_head(struct link *link, const char *data, size_t size) {
    size_t before = link->head.size;
    struct head head;
    append(&link->head, data, size);
    if (!read_head(link->head.data, link->head.size, &head)) return size;
    link->status = atoi(link->head.data + 9);
    link->part = head.is_chunked ? CHUNK_SIZE : SIZED;
    link->left = head.is_chunked ? 0 : head.length;
    link->is_line_empty = true;
    link->has_size = false;
    if (!head.is_chunked && head.length < 0) die("a reply tells no length: %.*s", (int)head.size, link->head.data);
    if (link->status != 200) link->client->reply.size = 0;
    return head.size - before;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static size_t take_line(struct link *link, const char *data, size_t size) {
    const char *end = memchr(data, '\n', size);
    size_t used = end ? (size_t)(end - data) + 1 : size;
    if (link->part == CHUNK_SIZE) {
        for (size_t i = 0; i < used && !link->has_size; i++) {
            int digit = hex_digit(data[i]);
            if (digit < 0) link->has_size = true;
            else link->left = link->left * 16 + digit;
        }
    } else {
        for (size_t i = 0; i < used; i++) link->is_line_empty &= data[i] == '\r' || data[i] == '\n';
    }
    if (!end) return used;
    if (link->part == CHUNK_SIZE) link->part = link->left ? CHUNK : TRAILER;
    else if (link->part == CHUNK_END) link->part = CHUNK_SIZE, link->left = 0;
    else if (link->is_line_empty) finish_reply(link);
    link->is_line_empty = true;
    link->has_size = false;
    return used;
}

static void take(struct link *link, const char *data, size_t size, uint64_t now) {
    while (size) {
        size_t used;
        if (link->part == HEAD) {
            used = take_head(link, data, size);
        } else if (link->part == SIZED || link->part == CHUNK) {
            used = (size_t)link->left < size ? (size_t)link->left : size;
            take_body(link, data, used, now);
            link->left -= (long)used;
        } else {
            used = take_line(link, data, size);
        }
        data += used, size -= used;
        if (link->part == CHUNK && link->left == 0) link->part = CHUNK_END;
        if (link->part == SIZED && link->left == 0) finish_reply(link);
    }
}

static void hear(struct link *link) {
    static char block[READ_BYTES];
    ssize_t got = recv(link->fd, block, sizeof block, MSG_DONTWAIT);
    if (got > 0) take(link, block, (size_t)got, now_ns());
    if (is_slow && is_counting && link->client->num_tokens)
        watch(poller, link->fd, 0, link, EPOLL_CTL_MOD);
    if (got > 0 || (got < 0 && errno == EAGAIN)) return;
    struct client *client = link->client;
    bool is_lost = client->is_waiting && link == &client->links[decode_port && !client->is_prefill];
    reconnect(link);
    if (is_lost) {
        complain("the connection was closed", "", 0);
        over(client);
    }
}

/* ── a run ── */

static void step(int timeout_ms) {
    struct epoll_event events[MAX_EVENTS];
    int count = epoll_wait(poller, events, MAX_EVENTS, timeout_ms);
    for (int i = 0; i < count; i++) {
        struct link *link = events[i].data.ptr;
        if (!link) {
            is_told = true;
            continue;
        }
        if (events[i].events & EPOLLOUT) push(link);
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(link);
    }
}

/* Whether requests that count, or warm up, are still under way or to come. */
static bool is_going(void) {
    return (is_hold && is_counting ? num_first + num_over : num_over) < num_wanted;
}

/* Zero where it is time. */
static uint64_t wait_ns(uint64_t due) {
    uint64_t now = now_ns();
    return due > now ? due - now : 0;
}

/* Those beside that may send again do; the time until the next one may. */
static uint64_t begin_beside(void) {
    uint64_t soonest = UINT64_MAX;
    for (struct client *client = clients + num_clients; client < clients + num_clients + num_beside; client++) {
        if (client->is_waiting) continue;
        uint64_t left = wait_ns(client->due);
        if (!left) begin(client);
        else if (left < soonest) soonest = left;
    }
    return soonest;
}

static void make(long wanted, long spread, bool counting) {
    uint64_t started = now_ns(), spread_ns = (uint64_t)spread * NS_PER_MS;
    long beginners = wanted < num_clients && !(is_staying && counting) ? wanted : num_clients;
    num_wanted = wanted;
    num_sent = num_over = num_first = num_errors = num_beside_over = 0;
    is_counting = counting;
    for (long i = 0; i < num_beside; i++) clients[num_clients + i].due = 0;
    for (long next = 0; is_going() || num_beside_open || (is_staying && next < beginners);) {
        uint64_t left = is_going() ? begin_beside() : UINT64_MAX;
        while (next < beginners) {
            uint64_t wait = wait_ns(started + spread_ns * (uint64_t)next / (uint64_t)beginners);
            if (wait) {
                if (wait < left) left = wait;
                break;
            }
            if (num_sent < wanted || is_staying) begin(&clients[next]);
            next++;
        }
        if (is_staying && next == beginners && !is_going()) break;
        step(left == UINT64_MAX ? -1 : (int)(left / NS_PER_MS) + 1);
    }
}

static void wait_for_line(void) {
    char line[16];
    if (!fgets(line, sizeof line, stdin)) exit(0);
}

/* Those of one part of a second who have a token take one byte more. */
static void sip(long part) {
    char byte;
    for (long i = part; i < num_clients; i += SIPS)
        if (clients[i].num_tokens && recv(clients[i].links[0].fd, &byte, 1, MSG_DONTWAIT) == 0)
            complain("a slow reader was left", "", 0);
}

/* Everybody goes on until there is a line. */
static void stay(void) {
    uint64_t due = now_ns();
    for (long part = 0; !is_told;) {
        step(is_slow ? (int)(wait_ns(due) / NS_PER_MS) + 1 : -1);
        if (!is_slow || wait_ns(due)) continue;
        sip(part++ % SIPS);
        due += SIP_NS;
    }
    is_told = false;
    wait_for_line();
}

static void print_all(const char *name, const uint32_t *values, size_t count) {
    printf(",\"%s\":[", name);
    for (size_t i = 0; i < count; i++) printf(i ? ",%u" : "%u", values[i]);
    printf("]");
}

static void tell(uint64_t wall_ns) {
    printf("{\"requests\":%ld,\"beside\":%ld,\"errors\":%ld,\"complaint\":\"%s\",\"tokens\":%llu,\"wall_ns\":%llu",
           is_hold && !is_staying ? num_first + num_errors : num_over - num_forgotten, num_beside_over, num_errors,
           complaint, (unsigned long long)sum_tokens, (unsigned long long)wall_ns);
    print_all("first_tokens", first_tokens, (size_t)(num_first < num_requests ? num_first : num_requests));
    print_all("transits", transits, num_transits);
    puts("}");
    fflush(stdout);
}

static void write_prompt(struct bytes *to, long size) {
    static const char text[] = "The cache of a long prompt travels once, and whoever waits for it waits for all of it.\\n"
                               "\\\"Pages\\\" are granted before the first byte moves; 4,096 of them are a buffer. ";
    for (long left = size; left > 0; left -= (long)sizeof text - 1)
        append(to, text, left < (long)sizeof text - 1 ? (size_t)left : sizeof text - 1);
    while (to->size && to->data[to->size - 1] == '\\') to->size--;
}

static void write_body(struct body *body, const struct bytes *prompt, long tokens, bool stream) {
    const char *ends = is_chat ? "\"}]" : "\"";
    char options[128];
    append(&body->whole, prompt->data, prompt->size);
    append(&body->whole, options, (size_t)snprintf(options, sizeof options, "%s,\"max_tokens\":%ld,\"stream\":%s%s}", ends,
                                                   tokens, stream ? "true" : "false", is_slow ? ",\"pad\":true" : ""));
    append(&body->prefill, prompt->data, prompt->size);
    append(&body->prefill, options, (size_t)snprintf(options, sizeof options,
        "%s,\"max_tokens\":1,\"kv_transfer_params\":{\"do_remote_decode\":true}}", ends));
}

static void write_bodies(long prompt_bytes) {
    struct bytes prompt = {0};
    reserve(&prompt, 1);
    write_prompt(&prompt, prompt_bytes);
    for (int counts = 0; counts < 2; counts++)
        write_body(&bodies[counts], &prompt, counts ? num_tokens : WARM_TOKENS, is_stream);
    release(&prompt);
}

static void read_beside(const char *path) {
    FILE *file = fopen(path, "r");
    struct bytes line = {0};
    ssize_t size;
    if (!file) die("%s: %s", path, strerror(errno));
    while ((size = getline(&line.data, &line.room, file)) > 1) {
        line.size = (size_t)size - (line.data[size - 1] == '\n');
        beside = realloc(beside, (num_beside_bodies + 1) * sizeof *beside);
        if (!beside) die("out of memory");
        beside[num_beside_bodies] = (struct body){0};
        write_body(&beside[num_beside_bodies++], &line, BESIDE_TOKENS, false);
    }
    release(&line);
    fclose(file);
    if (!num_beside_bodies) die("%s: there are no prompts in it", path);
}

static void write_headers(long count) {
    char line[HEADER_BYTES + 1];
    reserve(&headers, 1);
    for (long i = 0; i < count; i++)
        append(&headers, line, (size_t)snprintf(line, sizeof line, "x-bench-%03ld: a value of it\r\n", i));
}

static void connect_all(void) {
    for (long i = 0; i < num_clients + num_beside; i++) {
        clients[i].is_beside = i >= num_clients;
        for (int j = 0; j < 2; j++)
            if (!(clients[i].front[j] = malloc(FRONT_BYTES + headers.size))) die("out of memory");
        for (int j = 0; j < (decode_port ? 2 : 1); j++) {
            clients[i].links[j].client = &clients[i];
            connect_link(&clients[i].links[j], j ? decode_port : port);
        }
        if (i % CONNECTS == CONNECTS - 1) usleep(CONNECT_PAUSE_US);
    }
}

int main(int argc, char **argv) {
    port = number(argc, argv, "port", 0);
    decode_port = number(argc, argv, "decode_port", 0);
    num_clients = number(argc, argv, "clients", 1);
    num_requests = number(argc, argv, "requests", 1);
    num_tokens = number(argc, argv, "tokens", 1);
    spread_ms = number(argc, argv, "spread_ms", 0);
    is_stream = number(argc, argv, "stream", 0);
    is_chat = number(argc, argv, "chat", 0);
    is_hold = number(argc, argv, "hold", 0);
    num_marks = number(argc, argv, "marks", 0);
    num_beside = number(argc, argv, "beside", 0);
    beside_pause_ms = number(argc, argv, "beside_pause_ms", 0);
    is_staying = number(argc, argv, "stay", 0);
    is_slow = number(argc, argv, "slow", 0);
    num_models = number(argc, argv, "models", 1);
    write_headers(number(argc, argv, "headers", 0));
    write_bodies(number(argc, argv, "prompt_bytes", 0));
    if (num_beside) read_beside(option(argc, argv, "beside_file", ""));
    poller = epoll_create1(EPOLL_CLOEXEC);
    clients = calloc((size_t)(num_clients + num_beside), sizeof *clients);
    first_tokens = calloc((size_t)num_requests, sizeof *first_tokens);
    if (!clients || !first_tokens) die("out of memory");
    connect_all();
    long warmup = number(argc, argv, "warmup", 0);
    if (warmup) make(warmup, 0, false);
    if (num_errors) die("%ld of %ld requests failed while warming up: %s", num_errors, warmup, complaint);
    puts("ready");
    fflush(stdout);
    wait_for_line();
    uint64_t started = now_ns();
    make(num_requests, spread_ms, true);
    uint64_t ended = now_ns();
    puts("done");
    fflush(stdout);
    if (is_staying) watch(poller, STDIN_FILENO, EPOLLIN, NULL, EPOLL_CTL_ADD);
    while (is_staying) {
        stay();
        tell(now_ns() - started);
        num_forgotten = num_over;
        num_transits = sum_tokens = 0;
        started = now_ns();
    }
    wait_for_line();
    tell(ended - started);
    return 0;
}
