/* A prefiller and a decoder in one process, which compute nothing: what a proxy costs is all that is left to see.

   engine prefill_port=P decode_port=D delay_us=U lockstep=0|1 late=0|1 blocks=B ids=0|1 sglang=0|1 addresses=A models=M
          pad=B buffer=B

   Speaks vLLM's NIXL hand-over (``kv_transfer_params``) and SGLang's (both legs at once, ``bootstrap_room``). A decode
   leg gets its first token at once and the next ones every `delay_us`, each with the time at which it was written; with
   `lockstep` all streams get theirs together, as of one engine's step; with `late` the first one takes as long. No model
   but "bench" is served. Asked what it is, it says vLLM, or SGLang with `sglang`. ``GET /bench`` says what every
   decode leg carried.
   With `addresses` there are so many prefillers and decoders, each pair at a loopback address of its own, and all at
   the same two ports. Of `models` each address has its share, one at least. Tokens are `pad` bytes larger for a body
   with "pad":true, and connections hold `buffer` bytes that are not taken. */
#include "json.h"
#include <signal.h>
#include <sys/timerfd.h>

#define READ_BYTES (256 * 1024)
#define SMALL 4096
#define MAX_PAD 65536
#define NUM_BUCKETS (1 << 14)
#define BLOCK_TOKENS 16
#define BYTES_PER_TOKEN 4

enum handover { NONE, VLLM, SGLANG };

/* A connection, with the one request that it is busy with, if `is_busy`. In `line` while it has tokens to get and
   nothing in `out`. */
struct peer {
    int fd;
    bool is_decoder, is_busy, is_watching_out, is_dead, is_in_line;
    struct bytes in, out;
    bool is_stream, is_chat, wants_usage, is_padded;
    long address;
    long left;          /* tokens yet to be written */
    uint64_t due, room;
    struct peer *next;  /* in `line`, in a bucket of `waiting`, or in `dead` */
};

static struct {
    unsigned long long prefills, decodes, handed, unhanded, forged, broken;
} seen;

static int poller, ticker;
static uint64_t delay_ns, tick_ns;  /* tick_ns: what the ticker is set to */
static bool is_lockstep, is_late, tells_ids, is_sglang;
static long num_blocks, num_addresses, num_models, num_shares, pad, buffer_bytes;
static struct listener {
    int fd;
    long address;
    bool is_decoder;
} *listeners;
static uint8_t *given;          /* by a handoff's number: 1 given out, 2 taken */
static size_t num_given, room_given;
static struct peer *first, *last, *dead;
static size_t num_in_line;

/* SGLang's rooms that only one leg has come for: a prefill leg that has been answered (peer NULL) or a decode leg. */
struct room {
    uint64_t number;
    struct peer *decoder;
    struct room *next;
};
static struct room *rooms[NUM_BUCKETS];

static void serve(struct peer *peer);

/* ── writing ── */

static void bury(struct peer *peer) {
    if (peer->is_dead) return;
    peer->is_dead = true;
    epoll_ctl(poller, EPOLL_CTL_DEL, peer->fd, NULL);
    close(peer->fd);
    /* One in line is found there when its turn comes. */
    if (!peer->is_in_line) {
        peer->next = dead;
        dead = peer;
    }
}

static void want_out(struct peer *peer, bool wanted) {
    if (peer->is_watching_out == wanted || peer->is_dead) return;
    peer->is_watching_out = wanted;
    watch(poller, peer->fd, EPOLLIN | (wanted ? EPOLLOUT : 0), peer, EPOLL_CTL_MOD);
}

/* What the socket does not take is kept. */
static void say(struct peer *peer, const char *data, size_t size) {
    if (peer->is_dead) return;
    if (peer->out.size == 0) {
        ssize_t sent = send(peer->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            bury(peer);
            return;
        }
        if (sent > 0) data += sent, size -= (size_t)sent;
    }
    if (size) {
        append(&peer->out, data, size);
        want_out(peer, true);
    }
}

static void say_json(struct peer *peer, const char *status, const char *body, size_t size) {
    char head[256];
    int length = snprintf(head, sizeof head, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                          status, size);
    struct bytes all = {0};
    append(&all, head, (size_t)length);
    append(&all, body, size);
    say(peer, all.data, all.size);
    release(&all);
}

static void say_text(struct peer *peer, const char *status, const char *format, ...) {
    char body[SMALL];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(body, sizeof body, format, arguments);
    va_end(arguments);
    say_json(peer, status, body, (size_t)length);
}

static void say_event(struct peer *peer, const char *event, size_t size, bool is_last) {
    char frame[SMALL + MAX_PAD];
    int length = snprintf(frame, sizeof frame, "%zx\r\n%.*s\r\n%s", size, (int)size, event, is_last ? "0\r\n\r\n" : "");
    say(peer, frame, (size_t)length);
}

/* ── tokens ── */

static void line_up(struct peer *peer, uint64_t due) {
    peer->due = due;
    peer->next = NULL;
    peer->is_in_line = true;
    if (last) last->next = peer;
    else first = peer;
    last = peer;
    num_in_line++;
}

#define STARTED "\"created\":1,\"model\":\"bench\","
#define TEXT_OPENS "{\"id\":\"cmpl-bench\",\"object\":\"text_completion\"," STARTED
#define CHAT_OPENS "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\"," STARTED
#define CHUNK_OPENS "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\"," STARTED

static void finish(struct peer *peer) {
    static const char done[] = "data: [DONE]\n\n";
    char usage[SMALL];
    if (peer->wants_usage) {
        int length = snprintf(usage, sizeof usage,
            "data: %s\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"total_tokens\":2,\"completion_tokens\":1}}\n\n",
            peer->is_chat ? CHUNK_OPENS : TEXT_OPENS);
        say_event(peer, usage, (size_t)length, false);
    }
    say_event(peer, done, sizeof done - 1, true);
    peer->is_busy = false;
    serve(peer);
}

static void say_token(struct peer *peer) {
    char event[SMALL + MAX_PAD];
    int padding = peer->is_padded ? (int)pad : 0;
    peer->left--;
    int length = snprintf(event, sizeof event,
                          peer->is_chat ? "data: " CHUNK_OPENS
                          "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%c%019llu\"},\"logprobs\":null,"
                          "\"finish_reason\":%s,\"stop_reason\":null}]%*s}\n\n" : "data: " TEXT_OPENS
                          "\"choices\":[{\"index\":0,\"text\":\"%c%019llu\",\"logprobs\":null,\"finish_reason\":%s,"
                          "\"stop_reason\":null}]%*s}\n\n",
                          MARK, (unsigned long long)now_ns(), peer->left ? "null" : "\"length\"", padding, "");
    say_event(peer, event, (size_t)length, false);
}

static uint64_t next_due(uint64_t was_due, uint64_t now) {
    return is_lockstep && delay_ns ? (now / delay_ns + 1) * delay_ns : was_due + delay_ns;
}

/* Each stream at most once, so that nothing else waits long. */
static void tick(void) {
    uint64_t now = now_ns();
    for (size_t count = num_in_line; count && first->due <= now; count--) {
        struct peer *peer = first;
        first = peer->next;
        if (!first) last = NULL;
        num_in_line--;
        peer->is_in_line = false;
        if (peer->is_dead) {
            peer->next = dead;
            dead = peer;
            continue;
        }
        say_token(peer);
        if (peer->is_dead) continue;
        if (!peer->left) finish(peer);
        else if (!peer->out.size) line_up(peer, next_due(peer->due, now));
    }
}

static void set_ticker(void) {
    struct itimerspec when = {0};
    uint64_t due = first ? first->due : 0;
    if (due == tick_ns || delay_ns == 0) return;
    tick_ns = due;
    when.it_value.tv_sec = (time_t)(due / NS_PER_S);
    when.it_value.tv_nsec = (long)(due % NS_PER_S);
    timerfd_settime(ticker, TFD_TIMER_ABSTIME, &when, NULL);
}

/* ── the legs ── */

struct request {
    const char *body, *end;
    long max_tokens;
    bool is_stream, is_chat, wants_usage, is_padded;
    enum handover handover;
    uint64_t room;
};

static struct request read_request(const char *body, const char *end, bool is_chat) {
    struct request request = {.body = body, .end = end, .max_tokens = 16, .is_chat = is_chat};
    const char *value = field_of(body, end, "\"max_tokens\"");
    if (!value) value = field_of(body, end, "\"max_completion_tokens\"");
    if (value) request.max_tokens = atol(value);
    request.is_stream = reads(field_of(body, end, "\"stream\""), end, "true");
    request.is_padded = pad && reads(field_of(body, end, "\"pad\""), end, "true");
    request.wants_usage = request.is_stream && reads(field_of(body, end, "\"include_usage\""), end, "true");
    if (field_of(body, end, "\"kv_transfer_params\"")) request.handover = VLLM;
    else if ((value = field_of(body, end, "\"bootstrap_room\""))) {
        request.handover = SGLANG;
        request.room = strtoull(value, NULL, 10);
    }
    return request;
}

static int write_params(char *text, size_t room, uint64_t handoff) {
    unsigned long long n = handoff;
    return snprintf(text, room,
                    "{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[%llu,%llu,%llu],"
                    "\"remote_engine_id\":\"engine-%llu\",\"remote_request_id\":\"cmpl-%llu-0\","
                    "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1}",
                    3 * n + 1, 3 * n + 2, 3 * n + 3, n ^ 0x5eed, n);
}

static uint64_t give_handoff(void) {
    if (num_given == room_given) {
        room_given = room_given ? 2 * room_given : 1 << 16;
        given = realloc(given, room_given);
        if (!given) die("out of memory");
    }
    given[num_given] = 1;
    return num_given++;
}

/* Every field of what was given out is there, as it was given out, and for the first time. */
static bool take_handoff(const struct request *request) {
    const char *params = field_of(request->body, request->end, "\"kv_transfer_params\"");
    const char *end = object_end(params, request->end);
    const char *id = end ? value_of(params, end, "\"remote_request_id\"") : NULL;
    if (!id || strncmp(id, "\"cmpl-", 6) != 0) return false;
    uint64_t handoff = strtoull(id + 6, NULL, 10);
    if (handoff >= num_given || given[handoff] != 1) return false;
    char expected[SMALL];
    write_params(expected, sizeof expected, handoff);
    for (char *name = expected + 1, *next; name && *name; name = next) {
        char *value = strchr(name, ':');
        next = strstr(value, ",\"");
        if (next) *next++ = '\0';
        else value[strlen(value) - 1] = '\0';  /* the object's own brace */
        *value++ = '\0';
        if (!reads(value_of(params, end, name), end, value)) return false;
    }
    given[handoff] = 2;
    return true;
}

static void answer(struct peer *peer) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    if (!peer->is_stream) {
        say_text(peer, "200 OK",
                 peer->is_chat ? CHAT_OPENS
                 "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%c%019llu\"},\"logprobs\":null,"
                 "\"finish_reason\":\"length\",\"stop_reason\":null}],"
                 "\"usage\":{\"prompt_tokens\":1,\"total_tokens\":%ld,\"completion_tokens\":%ld}}" : TEXT_OPENS
                 "\"choices\":[{\"index\":0,\"text\":\"%c%019llu\",\"logprobs\":null,\"finish_reason\":\"length\","
                 "\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":1,\"total_tokens\":%ld,\"completion_tokens\":%ld}}",
                 MARK, (unsigned long long)now_ns(), peer->left + 1, peer->left);
        peer->is_busy = false;
        return;
    }
    say(peer, head, sizeof head - 1);
    if (!is_late) say_token(peer);
    if (peer->is_dead) return;
    if (!peer->left) finish(peer);
    else if (!peer->out.size) line_up(peer, next_due(now_ns(), now_ns()));
}

static struct room **find_room(uint64_t number) {
    struct room **at = &rooms[(number * 0x9E3779B97F4A7C15ull) >> 50];
    while (*at && (*at)->number != number) at = &(*at)->next;
    return at;
}

/* The other leg of this room, if it has come before; else this one is kept. True where the room is complete. */
static bool meet(uint64_t number, struct peer *decoder, struct peer **other) {
    struct room **at = find_room(number);
    if (*at) {
        struct room *room = *at;
        *other = room->decoder;
        *at = room->next;
        free(room);
        return true;
    }
    struct room *room = malloc(sizeof *room);
    if (!room) die("out of memory");
    *room = (struct room){.number = number, .decoder = decoder, .next = *at};
    *at = room;
    return false;
}

static void decode(struct peer *peer, const struct request *request) {
    struct peer *none;
    seen.decodes++;
    peer->is_busy = true;
    peer->left = request->max_tokens;
    peer->is_stream = request->is_stream;
    peer->is_chat = request->is_chat;
    peer->wants_usage = request->wants_usage;
    peer->is_padded = request->is_padded;
    peer->room = request->room;
    if (request->handover == SGLANG && !meet(request->room, peer, &none)) return;
    if (request->handover == NONE) seen.unhanded++;
    else if (request->handover == VLLM && !take_handoff(request)) seen.forged++;
    else seen.handed++;
    answer(peer);
}

/* As many as were ever told, each of five digits and a comma: a real engine has them from its tokenizer, and to write
   them anew for every request would make this one the bottleneck. */
static struct bytes told_ids;

/* Of a completion with its choice, of a chat beside its choices. */
static void append_ids(struct bytes *body, const struct request *request) {
    if (!tells_ids || !reads(field_of(request->body, request->end, "\"return_token_ids\""), request->end, "true")) return;
    size_t count = (size_t)(request->end - request->body) / BYTES_PER_TOKEN;
    char text[16];
    for (size_t i = told_ids.size / 6; i < count; i++)
        append(&told_ids, text, (size_t)snprintf(text, sizeof text, "%zu,", 10000 + i % 20000));
    append(body, ",\"prompt_token_ids\":[", 21);
    if (count) append(body, told_ids.data, 6 * count - 1);
    append(body, "]", 1);
}

static void prefill(struct peer *peer, const struct request *request) {
    char text[SMALL];
    struct bytes body = {0};
    struct peer *decoder = NULL;
    seen.prefills++;
    bool met = request->handover == SGLANG && meet(request->room, NULL, &decoder);
    append(&body, text, (size_t)snprintf(text, sizeof text,
        "%s\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null",
        request->is_chat ? CHAT_OPENS : TEXT_OPENS,
        request->is_chat ? "\"message\":{\"role\":\"assistant\",\"content\":\" the\"}" : "\"text\":\" the\""));
    if (!request->is_chat) append_ids(&body, request);
    append(&body, text, (size_t)snprintf(text, sizeof text,
        "}],\"usage\":{\"prompt_tokens\":1,\"total_tokens\":2,\"completion_tokens\":1,\"prompt_tokens_details\":null}"));
    if (request->is_chat) append_ids(&body, request);
    if (request->handover == VLLM) {
        append(&body, ",\"kv_transfer_params\":", 22);
        append(&body, text, (size_t)write_params(text, sizeof text, give_handoff()));
    }
    append(&body, "}", 1);
    say_json(peer, "200 OK", body.data, body.size);
    release(&body);
    if (met && decoder && !decoder->is_dead) {
        seen.handed++;
        answer(decoder);
        serve(decoder);
    }
}

/* ── everything else that a proxy asks ── */

static bool is_at(const char *path, const char *which) {
    size_t length = strlen(which);
    return strncmp(path, which, length) == 0 && path[length] == ' ';
}

static void tell_metrics(struct peer *peer) {
    say_text(peer, "200 OK",
             "vllm:cache_config_info{block_size=\"%d\",cache_dtype=\"auto\",engine=\"0\",num_gpu_blocks=\"%ld\"} 1.0\n"
             "vllm:kv_cache_usage_perc{engine=\"0\"} 0.0\nprocess_start_time_seconds 1.0\n",
             BLOCK_TOKENS, num_blocks);
}

static void tell_models(struct peer *peer) {
    struct bytes body = {0};
    static const char opens[] = "{\"object\":\"list\",\"data\":[";
    char card[SMALL], name[MODEL_BYTES];
    append(&body, opens, sizeof opens - 1);
    for (long model = peer->address % num_shares; model < num_models; model += num_shares) {
        write_model(name, model);
        append(&body, card, (size_t)snprintf(card, sizeof card,
            "%s{\"id\":\"%s\",\"object\":\"model\",\"root\":\"%s\",\"owned_by\":\"%s\",\"parent\":null,"
            "\"max_model_len\":1048576}", model < num_shares ? "" : ",", name, name, is_sglang ? "sglang" : "vllm"));
    }
    append(&body, "]}", 2);
    say_json(peer, "200 OK", body.data, body.size);
    release(&body);
}

static bool has_model(const struct peer *peer, const char *value, const char *end) {
    char name[MODEL_BYTES], quoted[MODEL_BYTES + 2];
    if (!value || end - value < 8 || strncmp(value, "\"bench", 6) != 0) return false;
    long model = value[6] == '-' ? atol(value + 7) : 0;
    write_model(name, model);
    snprintf(quoted, sizeof quoted, "\"%s\"", name);
    return model < num_models && model % num_shares == peer->address % num_shares && reads(value, end, quoted);
}

static void tell_legs(struct peer *peer) {
    say_text(peer, "200 OK",
             "{\"prefills\":%llu,\"decodes\":%llu,\"handed\":%llu,\"unhanded\":%llu,\"forged\":%llu,\"broken\":%llu}",
             seen.prefills, seen.decodes, seen.handed, seen.unhanded, seen.forged, seen.broken);
}

static void tell(struct peer *peer, const char *path) {
    if (is_at(path, "/health")) say_text(peer, "200 OK", "{}");
    else if (is_at(path, "/v1/models")) tell_models(peer);
    else if (is_at(path, "/bench")) tell_legs(peer);
    else if (!is_sglang && is_at(path, "/version")) say_text(peer, "200 OK", "{\"version\":\"0.32.0\"}");
    else if (!is_sglang && is_at(path, "/metrics")) tell_metrics(peer);
    else if (is_sglang && (is_at(path, "/server_info") || is_at(path, "/get_server_info") || is_at(path, "/model_info") ||
                           is_at(path, "/get_model_info")))
        say_text(peer, "200 OK", "{\"model_path\":\"bench\",\"served_model_name\":\"bench\",\"version\":\"0.5\"}");
    else say_text(peer, "404 Not Found", "{\"error\":{\"message\":\"there is no such path\"}}");
}

/* ── reading ── */

/* Whatever whole request stands at the front. One after the other: what comes behind a busy one waits. */
static void serve(struct peer *peer) {
    struct head head;
    while (!peer->is_dead && !peer->is_busy && read_head(peer->in.data ? peer->in.data : "", peer->in.size, &head)) {
        size_t size = head.size + (head.length > 0 ? (size_t)head.length : 0);
        const char *path = memchr(peer->in.data, ' ', head.size);
        if (head.is_chunked || !path || strncmp(peer->in.data, "PRI ", 4) == 0) {
            say_text(peer, "400 Bad Request", "{}");
            bury(peer);
            return;
        }
        if (peer->in.size < size) {
            reserve(&peer->in, size - peer->in.size);
            return;
        }
        path++;
        bool is_chat = is_at(path, "/v1/chat/completions");
        if (is_chat || is_at(path, "/v1/completions")) {
            struct request request = read_request(peer->in.data + head.size, peer->in.data + size, is_chat);
            if (!has_model(peer, field_of(request.body, request.end, "\"model\""), request.end))
                say_text(peer, "404 Not Found", "{\"error\":{\"message\":\"there is no such model\"}}");
            else if (peer->is_decoder) decode(peer, &request);
            else prefill(peer, &request);
        } else {
            tell(peer, path);
        }
        drop_front(&peer->in, size);
    }
}

static void hear(struct peer *peer) {
    reserve(&peer->in, peer->in.room - peer->in.size > SMALL ? 0 : SMALL);
    size_t room = peer->in.room - peer->in.size;
    ssize_t got = recv(peer->fd, peer->in.data + peer->in.size, room < READ_BYTES ? room : READ_BYTES, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) {
        if (peer->is_busy) seen.broken++;
        bury(peer);
    } else if (got > 0) {
        peer->in.size += (size_t)got;
        serve(peer);
    }
}

static void flush(struct peer *peer) {
    ssize_t sent = send(peer->fd, peer->out.data, peer->out.size, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN) bury(peer);
        return;
    }
    drop_front(&peer->out, (size_t)sent);
    if (peer->out.size) return;
    want_out(peer, false);
    if (peer->is_busy && peer->left && !peer->is_in_line) line_up(peer, now_ns());
}

static void welcome(const struct listener *listener) {
    int fd;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct peer *peer = calloc(1, sizeof *peer);
        if (!peer) die("out of memory");
        set_no_delay(fd);
        if (buffer_bytes) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){(int)buffer_bytes}, sizeof(int));
        peer->fd = fd;
        peer->is_decoder = listener->is_decoder;
        peer->address = listener->address;
        watch(poller, fd, EPOLLIN, peer, EPOLL_CTL_ADD);
    }
}

/* A leg that waits in a room must not be found there any more. */
static void clear_dead(void) {
    while (dead) {
        struct peer *peer = dead;
        dead = peer->next;
        struct room **at = find_room(peer->room);
        if (peer->room && *at && (*at)->decoder == peer) {
            struct room *room = *at;
            *at = room->next;
            free(room);
        }
        release(&peer->in);
        release(&peer->out);
        free(peer);
    }
}

static void listen_at_all(long prefill_port, long decode_port) {
    listeners = calloc(2 * (size_t)num_addresses, sizeof *listeners);
    if (!listeners) die("out of memory");
    for (long i = 0; i < 2 * num_addresses; i++) {
        struct listener *one = &listeners[i];
        *one = (struct listener){.address = i / 2, .is_decoder = i % 2};
        one->fd = listen_on(loopback_at(one->address, one->is_decoder ? decode_port : prefill_port));
        watch(poller, one->fd, EPOLLIN, one, EPOLL_CTL_ADD);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    delay_ns = (uint64_t)number(argc, argv, "delay_us", 0) * 1000;
    is_lockstep = number(argc, argv, "lockstep", 0);
    is_late = number(argc, argv, "late", 0);
    is_sglang = number(argc, argv, "sglang", 0);
    tells_ids = number(argc, argv, "ids", 1);
    num_blocks = number(argc, argv, "blocks", 1 << 20);
    num_addresses = number(argc, argv, "addresses", 1);
    num_models = number(argc, argv, "models", 1);
    num_shares = num_models < num_addresses ? num_models : num_addresses;
    pad = number(argc, argv, "pad", 0);
    if (pad > MAX_PAD) die("a pad has at most %d bytes", MAX_PAD);
    buffer_bytes = number(argc, argv, "buffer", 0);
    poller = epoll_create1(EPOLL_CLOEXEC);
    ticker = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(poller, ticker, EPOLLIN | EPOLLET, &ticker, EPOLL_CTL_ADD);  /* edges: nobody need read it */
    listen_at_all(number(argc, argv, "prefill_port", 0), number(argc, argv, "decode_port", 0));
    struct epoll_event events[MAX_EVENTS];
    puts("ready");
    fflush(stdout);
    for (;;) {
        set_ticker();
        bool is_due = first && first->due <= now_ns();
        int count = epoll_wait(poller, events, MAX_EVENTS, is_due ? 0 : -1);
        for (int i = 0; i < count; i++) {
            void *owner = events[i].data.ptr;
            struct peer *peer = owner;
            if (owner == &ticker) {
                tick_ns = 0;
            } else if (owner >= (void *)listeners && owner < (void *)(listeners + 2 * num_addresses)) {
                welcome(owner);
            } else {
                if (!peer->is_dead && events[i].events & EPOLLOUT) flush(peer);
                if (!peer->is_dead && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(peer);
            }
        }
        tick();
        clear_dead();
    }
}
