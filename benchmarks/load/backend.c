// Stand-ins for inference engines that are never the limit of a benchmark: one thread, epoll, several ports.
//
//   backend MODEL PORT...
//
// Chat completions are answered at once, or streamed when the body holds "stream": true. Two legal fields of the
// body steer a stream, so that routers which write the body anew keep them: "max_tokens" is the number of events,
// "seed" the microseconds between two of them (0: all at once). All streams of a run must have the same gap.
// GET serves what routers ask engines before they use them: health, models, gauges, server information.
// Prints "ready" when it listens.
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS_A_POLL = 512, SEARCHED_BYTES = 2048, READ_BYTES = 16384 };

typedef struct connection {
    int fd;
    int listening;
    int dead;
    char *in;  // a request, as far as it has come
    size_t in_bytes, in_room;
    char *out;  // what the socket did not take yet
    size_t out_bytes, out_sent, out_room;
    int waits_to_write;
    int streaming, queued;
    long events_left, events;  // of the stream that is being sent
    int64_t gap_ns, due_ns;
    struct connection *before, *after;  // in the line of paced streams, the next one due first
} connection;

static int poller;
static const char *model;
static connection *first_due, *last_due;
static connection *dead[EVENTS_A_POLL * 2];
static int dead_count;
static long running;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void enqueue(connection *c) {
    c->queued = 1;
    c->after = NULL;
    c->before = last_due;
    *(last_due ? &last_due->after : &first_due) = c;
    last_due = c;
}

static void dequeue(connection *c) {
    c->queued = 0;
    *(c->before ? &c->before->after : &first_due) = c->after;
    *(c->after ? &c->after->before : &last_due) = c->before;
}

static void drop(connection *c) {
    if (c->dead) return;
    c->dead = 1;
    if (c->queued) dequeue(c);
    if (c->streaming) running--;
    close(c->fd);
    dead[dead_count++] = c;  // freed when no event of this round can name it any more
}

static void watch(connection *c, int for_writing) {
    if (c->waits_to_write == for_writing) return;
    c->waits_to_write = for_writing;
    struct epoll_event wanted = {.events = EPOLLIN | (for_writing ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &wanted);
}

static void write_out(connection *c, const char *data, size_t bytes) {
    if (c->dead) return;
    if (c->out_sent == c->out_bytes) {
        ssize_t sent = send(c->fd, data, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            drop(c);
            return;
        }
        if (sent > 0) data += sent, bytes -= sent;
        if (!bytes) return;
        c->out_bytes = c->out_sent = 0;
    }
    if (c->out_bytes + bytes > c->out_room) {
        c->out_room = (c->out_bytes + bytes) * 2;
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_bytes, data, bytes);
    c->out_bytes += bytes;
    watch(c, 1);
}

static void write_rest(connection *c) {
    while (c->out_sent < c->out_bytes) {
        ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_bytes - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) drop(c);
            return;
        }
        c->out_sent += sent;
    }
    watch(c, 0);
}

static void answer(connection *c, const char *status, const char *type, const char *body) {
    char text[4096];
    int bytes = snprintf(text, sizeof text,
                         "HTTP/1.1 %s\r\nserver: backend\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s",
                         status, type, strlen(body), body);
    write_out(c, text, bytes);
}

static void answer_json(connection *c, const char *body) { answer(c, "200 OK", "application/json", body); }

// One event of a stream as a chunk; the last one with the end of the stream.
static size_t put_event(char *out, long number, int last) {
    char event[512];
    int bytes = snprintf(event, sizeof event,
                         "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                         "\"model\":\"%s\",\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\" token\"},"
                         "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                         model, number ? "" : "\"role\":\"assistant\",", last ? "\"stop\"" : "null");
    return sprintf(out, "%x\r\n%s\r\n%s", bytes, event, last ? "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" : "");
}

// Sends what is due, and puts a stream that goes on (back) into the line, where it must not stand now.
static void stream(connection *c, int64_t now) {
    char out[65536];
    while (c->events_left && c->due_ns <= now && !c->dead) {
        size_t bytes = 0;
        while (c->events_left && c->due_ns <= now && bytes < sizeof out - 1024) {
            bytes += put_event(out + bytes, c->events - c->events_left, c->events_left == 1);
            c->events_left--;
            c->due_ns += c->gap_ns;
        }
        write_out(c, out, bytes);
    }
    if (c->dead) return;
    if (c->events_left) {
        enqueue(c);
    } else {
        c->streaming = 0;
        running--;
    }
}

static const char *find(const char *text, size_t bytes, const char *name) {
    const char *at = memmem(text, bytes, name, strlen(name));
    return at ? at + strlen(name) + strspn(at + strlen(name), ": ") : NULL;
}

static void complete(connection *c, const char *body, size_t body_bytes) {
    size_t searched = body_bytes < SEARCHED_BYTES ? body_bytes : SEARCHED_BYTES;
    const char *starts[] = {body, body + body_bytes - searched};  // options stand at either end of a body
    const char *streamed = NULL, *most = NULL, *gap = NULL;
    for (int i = 0; i < 2; i++) {
        if (!streamed) streamed = find(starts[i], searched, "\"stream\"");
        if (!most) most = find(starts[i], searched, "\"max_tokens\"");
        if (!most) most = find(starts[i], searched, "\"max_completion_tokens\"");
        if (!gap) gap = find(starts[i], searched, "\"seed\"");
    }
    if (!streamed || strncmp(streamed, "true", 4)) {
        char text[1024];
        snprintf(text, sizeof text,
                 "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"%s\","
                 "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Hello from the "
                 "backend, this is a short answer.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":"
                 "{\"prompt_tokens\":10,\"completion_tokens\":12,\"total_tokens\":22}}",
                 model);
        answer_json(c, text);
        return;
    }
    static const char head[] =
        "HTTP/1.1 200 OK\r\nserver: backend\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    write_out(c, head, sizeof head - 1);
    if (c->dead) return;
    c->streaming = 1;
    running++;
    c->events = c->events_left = most ? atol(most) : 64;
    c->gap_ns = gap ? atoll(gap) * 1000 : 0;
    c->due_ns = now_ns();
    stream(c, c->due_ns);
}

static void handle_get(connection *c, const char *path) {
    char text[2048];
    if (strstr(path, "health") || !strcmp(path, "/ping")) {
        answer(c, "200 OK", "text/plain", "");
    } else if (!strcmp(path, "/v1/models")) {
        snprintf(text, sizeof text,
                 "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1700000000,"
                 "\"owned_by\":\"sglang\",\"root\":\"%s\",\"max_model_len\":131072}]}",
                 model, model);
        answer_json(c, text);
    } else if (strstr(path, "server_info")) {
        snprintf(text, sizeof text,
                 "{\"model_path\":\"%s\",\"served_model_name\":\"%s\",\"tokenizer_path\":\"%s\",\"dp_size\":1,"
                 "\"tp_size\":1,\"max_total_num_tokens\":1000000,\"page_size\":16,\"version\":\"0.5.23\"}",
                 model, model, model);
        answer_json(c, text);
    } else if (strstr(path, "model_info")) {
        snprintf(text, sizeof text,
                 "{\"model_path\":\"%s\",\"tokenizer_path\":\"%s\",\"is_generation\":true,\"model_type\":\"llama\"}",
                 model, model);
        answer_json(c, text);
    } else if (!strcmp(path, "/version")) {
        answer_json(c, "{\"version\":\"0.11.0\"}");
    } else if (!strcmp(path, "/get_load")) {
        snprintf(text, sizeof text, "[{\"dp_rank\":0,\"num_reqs\":%ld,\"num_waiting_reqs\":0,\"num_tokens\":0}]",
                 running);
        answer_json(c, text);
    } else if (!strcmp(path, "/metrics")) {
        snprintf(text, sizeof text,
                 "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"%s\"} %ld\n"
                 "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"%s\"} 0\n"
                 "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"%s\"} 0.1\n",
                 model, running, model, model);
        answer(c, "200 OK", "text/plain; version=0.0.4", text);
    } else {
        answer(c, "404 Not Found", "application/json", "{}");
    }
}

// The bytes of a chunked body's framing and data at ``at``, 0 while it is incomplete; the data is moved together.
static size_t join_chunks(char *at, char *end, size_t *data_bytes) {
    size_t joined = 0;
    for (char *p = at;;) {
        char *line_end = memmem(p, end - p, "\r\n", 2);
        if (!line_end) return 0;
        size_t chunk = strtoul(p, NULL, 16);
        char *data = line_end + 2;
        if (data + chunk + 2 > end) return 0;
        if (!chunk) {
            *data_bytes = joined;
            p = at;
            for (size_t moved = 0; moved < joined;) {  // complete: now the data may be moved
                size_t bytes = strtoul(p, NULL, 16);
                char *from = (char *)memmem(p, end - p, "\r\n", 2) + 2;
                memmove(at + moved, from, bytes);
                moved += bytes;
                p = from + bytes + 2;
            }
            return data + 2 - at;
        }
        joined += chunk;
        p = data + chunk + 2;
    }
}

static void serve(connection *c) {
    while (!c->dead && !c->streaming && c->in_bytes) {
        char *head_end = memmem(c->in, c->in_bytes, "\r\n\r\n", 4);
        if (!head_end) return;
        char *body = head_end + 4, *end = c->in + c->in_bytes;
        *head_end = 0;
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        int chunked = strcasestr(c->in, "\r\ntransfer-encoding: chunked") != NULL;
        *head_end = '\r';
        size_t body_bytes = length ? strtoul(length + 17, NULL, 10) : 0, request_bytes;
        if (chunked) {
            size_t framed = join_chunks(body, end, &body_bytes);
            if (!framed) return;
            request_bytes = body - c->in + framed;
        } else {
            request_bytes = body - c->in + body_bytes;
            if (request_bytes > c->in_bytes) return;
        }
        if (!strncmp(c->in, "POST ", 5)) {
            complete(c, body, body_bytes);
        } else {
            char path[256] = "";
            sscanf(c->in, "%*s %255[^ ?]", path);
            handle_get(c, path);
        }
        if (c->dead) return;
        c->in_bytes -= request_bytes;
        memmove(c->in, c->in + request_bytes, c->in_bytes);
    }
}

static void read_in(connection *c) {
    for (;;) {
        if (c->in_room - c->in_bytes < READ_BYTES) c->in = realloc(c->in, c->in_room = c->in_room * 2 + READ_BYTES);
        size_t room = c->in_room - c->in_bytes;
        ssize_t got = recv(c->fd, c->in + c->in_bytes, room, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) {
            drop(c);
            return;
        }
        if (got > 0) c->in_bytes += got;
        if (got < (ssize_t)room) break;
    }
    serve(c);
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c});
    }
}

static void listen_on(int port) {
    connection *c = calloc(1, sizeof *c);
    c->listening = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(c->fd, (void *)&address, sizeof address) || listen(c->fd, 4096)) {
        perror("backend: cannot listen");
        exit(1);
    }
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c});
}

static void send_due(void) {
    int64_t now = now_ns();
    while (first_due && first_due->due_ns <= now) {
        connection *c = first_due;
        dequeue(c);
        stream(c, now);
        if (!c->dead && !c->streaming) serve(c);
        if (dead_count > EVENTS_A_POLL) return;
    }
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: backend MODEL PORT...\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    model = arguments[1];
    poller = epoll_create1(0);
    for (int i = 2; i < count; i++) listen_on(atoi(arguments[i]));
    puts("ready");
    fflush(stdout);
    struct epoll_event events[EVENTS_A_POLL];
    for (;;) {
        struct timespec wait = {0}, *timeout = NULL;
        if (first_due) {
            int64_t left_ns = first_due->due_ns - now_ns();
            if (left_ns > 0) wait = (struct timespec){left_ns / 1000000000, left_ns % 1000000000};
            timeout = &wait;
        }
        int happened = epoll_pwait2(poller, events, EVENTS_A_POLL, timeout, NULL);
        for (int i = 0; i < happened; i++) {
            connection *c = events[i].data.ptr;
            if (c->listening) {
                accept_all(c->fd);
                continue;
            }
            if (!c->dead && events[i].events & EPOLLOUT) write_rest(c);
            if (!c->dead && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_in(c);
        }
        send_due();
        while (dead_count) {
            connection *c = dead[--dead_count];
            free(c->in);
            free(c->out);
            free(c);
        }
    }
}
