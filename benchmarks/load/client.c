// The clients of a benchmark: keep-alive connections, in a closed loop or at a fixed rate; exact percentiles.
//
//   client PORT BODIES CONNECTIONS SECONDS [RATE]    measure, after a third of the time unmeasured
//   client PORT BODIES CONNECTIONS hold              open streams and hold them until stdin ends
//                                                    (those that answered within 30 s)
//
// BODIES holds a JSON body a line, which are sent in turn; ``########`` in a body becomes a number that no other
// request has. RATE (requests a second) gives each request the moment at which it is due, and its latency counts
// from there, however late it is sent. Prints a line "measuring", then a JSON line; or "holding N".
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

#define MARK "########"
#define OPEN_WITHIN_NS 30000000000
enum { EVENTS_A_POLL = 512, MARK_BYTES = 8, MOST_BODIES = 1024, HEAD_ROOM = 8192, READ_BYTES = 1 << 20 };

typedef enum { HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILERS } state;

typedef struct {
    char *bytes;
    size_t size;
    char *marks[4];
    int mark_count;
} request;

typedef struct {
    int fd, busy, status, events, sse, closes;
    state state;
    request *request;
    uint64_t number;
    size_t sent;
    char head[HEAD_ROOM], line[24];
    int head_bytes, line_bytes;
    long left;        // of the body or chunk
    char last_byte;   // of the stream
    int64_t begun_ns, first_ns;
} connection;

typedef struct {
    uint32_t *tenths_us;
    size_t count, room;
} times;

static int poller, port, holding;
static request requests[MOST_BODIES];
static int request_count, connection_count, held;
static uint64_t issued, done, events, errors, refused;
static char first_refusal[200];
static times latencies, first_bytes;
static double rate;
static int64_t measured_from_ns, ends_ns;
static double *due_times;
static size_t due_first, due_last;
enum { DUE_ROOM = 1 << 18 };

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void add(times *all, int64_t ns) {
    if (all->count == all->room) {
        all->room = all->room ? all->room * 2 : 1 << 16;
        all->tenths_us = realloc(all->tenths_us, all->room * sizeof *all->tenths_us);
    }
    all->tenths_us[all->count++] = ns / 100 > UINT32_MAX ? UINT32_MAX : ns / 100;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile_ms(times *sorted, double share) {
    return sorted->count ? sorted->tenths_us[(size_t)(share * (sorted->count - 1) + 0.5)] / 1e4 : 0;
}

static void read_bodies(const char *path) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    ssize_t bytes;
    if (!file) {
        perror(path);
        exit(1);
    }
    while (request_count < MOST_BODIES && (bytes = getline(&line, &room, file)) > 1) {
        if (line[bytes - 1] == '\n') bytes--;
        request *r = &requests[request_count++];
        r->bytes = malloc(bytes + 512);
        int head = sprintf(r->bytes,
                           "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: client\r\n"
                           "Accept: */*\r\nContent-Type: application/json\r\nContent-Length: %zd\r\n\r\n",
                           port, bytes);
        memcpy(r->bytes + head, line, bytes);
        r->size = head + bytes;
        char *at = r->bytes;
        while (r->mark_count < 4 && (at = memmem(at, r->bytes + r->size - at, MARK, MARK_BYTES)))
            r->marks[r->mark_count++] = at, at += MARK_BYTES;
    }
    fclose(file);
}

static void open_connection(connection *c) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (c->fd < 0 || connect(c->fd, (void *)&address, sizeof address)) {
        perror("client: cannot connect");
        exit(1);
    }
    c->busy = 0;
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c});
}

static void send_rest(connection *c) {
    request *r = c->request;
    char number[MARK_BYTES + 1];
    snprintf(number, sizeof number, "%08u", (unsigned)(c->number % 100000000));
    for (int i = 0; i < r->mark_count; i++) memcpy(r->marks[i], number, MARK_BYTES);  // the bytes are shared
    while (c->sent < r->size) {
        ssize_t sent = send(c->fd, r->bytes + c->sent, r->size - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) break;
        c->sent += sent;
    }
    uint32_t wanted = EPOLLIN | (c->sent < r->size ? EPOLLOUT : 0);
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &(struct epoll_event){.events = wanted, .data.ptr = c});
}

static void begin(connection *c, int64_t due_ns) {
    c->busy = 1;
    c->state = HEAD;
    c->head_bytes = c->line_bytes = c->events = c->sse = c->closes = c->last_byte = 0;
    c->sent = 0;
    c->begun_ns = due_ns;
    c->first_ns = 0;
    c->request = &requests[issued % request_count];
    c->number = issued++;
    send_rest(c);
}

static void begin_next(connection *c) {
    c->busy = 0;
    if (rate > 0) {
        if (due_first != due_last) begin(c, due_times[due_first++ % DUE_ROOM]);
    } else if (!holding && now_ns() < ends_ns) {
        begin(c, now_ns());
    }
}

static void reopen(connection *c) {
    close(c->fd);
    open_connection(c);
}

static void end(connection *c) {
    int64_t now = now_ns();
    if (c->status != 200) {
        if (!refused++) snprintf(first_refusal, sizeof first_refusal, "%.*s", 100, c->head);
    } else if (now >= measured_from_ns && now <= ends_ns) {
        done++;
        add(&latencies, now - c->begun_ns);
        if (c->first_ns) add(&first_bytes, c->first_ns - c->begun_ns);
    }
    if (c->closes) reopen(c);
    begin_next(c);
}

static void count_events(connection *c, const char *data, size_t bytes) {
    int found = 0;
    for (const char *at = data, *stop = data + bytes; at < stop;) {
        const char *line_end = memchr(at, '\n', stop - at);
        if (!line_end) break;
        found += (line_end == data ? c->last_byte : line_end[-1]) == '\n';
        at = line_end + 1;
    }
    c->last_byte = data[bytes - 1];
    if (!found) return;
    int64_t now = now_ns();
    if (!c->first_ns) {
        c->first_ns = now;
        held++;
    }
    if (now >= measured_from_ns && now <= ends_ns) events += found;
}

static int head_complete(connection *c) {
    c->head[c->head_bytes] = 0;
    c->status = atoi(c->head + 9);
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->sse = strcasestr(c->head, "text/event-stream") != NULL;
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    c->left = length ? atol(length + 17) : 0;
    c->state = strcasestr(c->head, "\r\ntransfer-encoding:") ? CHUNK_SIZE : BODY;
    return c->state == BODY && !c->left;
}

// Takes a response's bytes; true when it ended with them.
static int take(connection *c, const char *at, const char *stop) {
    while (at < stop) {
        switch (c->state) {
        case HEAD:
            while (at < stop && c->state == HEAD) {
                c->head[c->head_bytes++] = *at++;
                if (c->head_bytes == HEAD_ROOM - 1) c->head_bytes--;
                if (c->head_bytes >= 4 && !memcmp(c->head + c->head_bytes - 4, "\r\n\r\n", 4) && head_complete(c))
                    return 1;
            }
            break;
        case BODY:
        case CHUNK: {
            long bytes = stop - at < c->left ? stop - at : c->left;
            if (c->sse) count_events(c, at, bytes);
            at += bytes;
            c->left -= bytes;
            if (c->left) break;
            if (c->state == BODY) return 1;
            c->state = CHUNK_END;
            break;
        }
        case CHUNK_END:
            if (*at++ == '\n') c->state = CHUNK_SIZE;
            break;
        case CHUNK_SIZE:
        case TRAILERS: {
            char byte = *at++;
            if (byte != '\n') {
                if (byte != '\r' && c->line_bytes < (int)sizeof c->line - 1) c->line[c->line_bytes++] = byte;
                break;
            }
            int empty = !c->line_bytes;
            c->line[c->line_bytes] = 0;
            c->line_bytes = 0;
            if (c->state == TRAILERS) {
                if (empty) return 1;
                break;
            }
            c->left = strtol(c->line, NULL, 16);
            c->state = c->left ? CHUNK : TRAILERS;
            break;
        }
        }
    }
    return 0;
}

static void receive(connection *c) {
    static char buffer[READ_BYTES];
    ssize_t got = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        if (c->busy) errors++;
        reopen(c);
        begin_next(c);
    } else if (take(c, buffer, buffer + got)) {
        end(c);
    }
}

static void hand_out_due(connection *all, double *next_due_ns, int64_t now) {
    static int last;
    for (; *next_due_ns <= now && *next_due_ns < ends_ns; *next_due_ns += 1e9 / rate) {
        int free = -1;
        for (int i = 1; i <= connection_count && free < 0; i++)
            if (!all[(last + i) % connection_count].busy) free = last = (last + i) % connection_count;
        if (free >= 0)
            begin(&all[free], *next_due_ns);
        else
            due_times[due_last++ % DUE_ROOM] = *next_due_ns;
    }
}

static void print_figures(double seconds) {
    qsort(latencies.tenths_us, latencies.count, sizeof(uint32_t), ascending);
    qsort(first_bytes.tenths_us, first_bytes.count, sizeof(uint32_t), ascending);
    for (char *p = first_refusal; *p; p++)
        if (*p < ' ' || *p == '"' || *p == '\\') *p = ' ';
    printf("{\"requests_per_s\":%.1f,\"p50_ms\":%.3f,\"p90_ms\":%.3f,\"p99_ms\":%.3f,\"events_per_s\":%.0f,"
           "\"first_event_p50_ms\":%.3f,\"first_event_p99_ms\":%.3f,\"requests\":%lu,\"errors\":%lu,"
           "\"refused\":%lu,\"first_refusal\":\"%s\"}\n",
           done / seconds, percentile_ms(&latencies, 0.5), percentile_ms(&latencies, 0.9),
           percentile_ms(&latencies, 0.99), events / seconds, percentile_ms(&first_bytes, 0.5),
           percentile_ms(&first_bytes, 0.99), (unsigned long)done, (unsigned long)errors, (unsigned long)refused,
           first_refusal);
}

int main(int count, char **arguments) {
    if (count < 5) {
        fprintf(stderr, "usage: client PORT BODIES CONNECTIONS SECONDS|hold [RATE]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    port = atoi(arguments[1]);
    read_bodies(arguments[2]);
    connection_count = atoi(arguments[3]);
    holding = !strcmp(arguments[4], "hold");
    double seconds = holding ? 1e6 : atof(arguments[4]);
    rate = count > 5 ? atof(arguments[5]) : 0;
    due_times = malloc(DUE_ROOM * sizeof *due_times);
    poller = epoll_create1(0);
    connection *all = calloc(connection_count, sizeof *all);
    int64_t started_ns = now_ns();
    issued = (uint64_t)started_ns / 1000 % 90000000;  // another run's requests are other requests
    for (int i = 0; i < connection_count; i++) {
        open_connection(&all[i]);
        if (holding) {
            ends_ns = INT64_MAX;
            begin(&all[i], now_ns());
        }
    }
    started_ns = now_ns();
    int64_t open_by_ns = started_ns + OPEN_WITHIN_NS;
    measured_from_ns = started_ns + (int64_t)(holding ? 0 : seconds / 3 * 1e9);
    ends_ns = measured_from_ns + (int64_t)(seconds * 1e9);
    for (int i = 0; rate <= 0 && !holding && i < connection_count; i++) begin(&all[i], now_ns());
    double next_due_ns = started_ns;
    int told = 0;
    struct epoll_event happened[EVENTS_A_POLL];
    if (holding) epoll_ctl(poller, EPOLL_CTL_ADD, 0, &(struct epoll_event){.events = EPOLLIN, .data.ptr = NULL});
    for (;;) {
        int64_t now = now_ns();
        if (!told && (holding ? held == connection_count || now >= open_by_ns : now >= measured_from_ns)) {
            told = 1;
            holding ? printf("holding %d\n", held) : puts("measuring");
            fflush(stdout);
        }
        if (now >= ends_ns) break;
        int64_t wait_ns = (told ? ends_ns : holding ? open_by_ns : measured_from_ns) - now;
        if (rate > 0) {
            hand_out_due(all, &next_due_ns, now);
            if (next_due_ns - now_ns() < wait_ns) wait_ns = next_due_ns - now_ns();
        }
        if (wait_ns < 0) wait_ns = 0;
        struct timespec timeout = {wait_ns / 1000000000, wait_ns % 1000000000};
        int number = epoll_pwait2(poller, happened, EVENTS_A_POLL, &timeout, NULL);
        for (int i = 0; i < number; i++) {
            connection *c = happened[i].data.ptr;
            if (!c) return 0;  // stdin ended: let go
            if (happened[i].events & EPOLLOUT) send_rest(c);
            if (happened[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
        }
    }
    print_figures(seconds);
    return 0;
}
