/* Init's watch over the first moments of a run, and its report. */

#include "helper.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static double seconds_of(struct timeval time)
{
    return time.tv_sec + time.tv_usec / 1e6;
}

/* Collect every child that has ended. Return whether the guest is among them. */
static int reap(pid_t guest, int *status)
{
    int ended = 0, one;
    pid_t pid;
    while ((pid = waitpid(-1, &one, WNOHANG)) > 0)
        if (pid == guest) {
            *status = one;
            ended = 1;
        }
    return ended;
}

/* Kill every other process of the namespace, and return once all are gone: all are descendants of init. */
static void end_everything(pid_t guest, int *status)
{
    int one;
    pid_t pid;
    for (;;) {
        pid = waitpid(-1, &one, WNOHANG);
        if (pid == 0) {
            kill(-1, SIGKILL);
            pid = waitpid(-1, &one, 0);
        }
        if (pid < 0)
            return;
        if (pid == guest)
            *status = one;
    }
}

static int is_full(int directory, const char *path)
{
    struct statvfs space;
    if ((path ? statvfs(path, &space) : fstatvfs(directory, &space)) != 0)
        return 0;
    return (uint64_t)space.f_bavail * space.f_frsize < 65536 || space.f_ffree == 0;
}

/* Count processes and threads together, as a process limit does, without init. Each writes its own name, so only the last parenthesis of
 * its status ends it. */
static uint64_t count_tasks(void)
{
    uint64_t tasks = 0;
    struct dirent *entry;
    DIR *proc = opendir("/proc");
    if (!proc)
        return 0;
    while ((entry = readdir(proc))) {
        char path[300], status[1024], *at;
        int file;
        ssize_t length;
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9' || !strcmp(entry->d_name, "1"))
            continue;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        if ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            continue; /* it has gone */
        length = read(file, status, sizeof status - 1);
        close(file);
        status[length > 0 ? length : 0] = 0;
        at = strrchr(status, ')');
        for (int field = 0; at && field < 18; field++) /* the number of threads is the 18th word behind the name */
            if ((at = strchr(at, ' ')))
                at++;
        tasks += at ? strtoull(at, NULL, 10) : 0;
    }
    closedir(proc);
    return tasks;
}

/* A value of Python's marshal format, version 2: what wire.receive() reads. */
struct report {
    unsigned char bytes[512];
    size_t length;
};

static void put(struct report *report, const void *bytes, size_t size)
{
    if (report->length + size > sizeof report->bytes)
        _exit(1);
    memcpy(report->bytes + report->length, bytes, size);
    report->length += size;
}

static void put_text(struct report *report, const char *text)
{
    uint32_t length = strlen(text);
    put(report, "u", 1);
    put(report, &length, 4);
    put(report, text, length);
}

static void put_int(struct report *report, int32_t value)
{
    put(report, "i", 1);
    put(report, &value, 4);
}

static void put_float(struct report *report, double value)
{
    put(report, "g", 1);
    put(report, &value, 8);
}

static void put_bytes_of(struct report *report, int64_t value)
{
    put(report, "I", 1);
    put(report, &value, 8);
}

static void say_end(const struct script *script, int status, const char *reason, const char *hit, double wall, int layers, int crowded)
{
    struct rusage used;
    struct report report = {{0}, 4};
    const char *hits[3];
    uint32_t count = 0;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU)
        reason = "cpu-limit", hit = "cpu";
    if (*hit)
        hits[count++] = hit;
    if (is_full(-1, script->scratch) || is_full(layers, NULL))
        hits[count++] = "disk";
    if (crowded)
        hits[count++] = "processes";
    getrusage(RUSAGE_CHILDREN, &used);
    put(&report, "{", 1);
    put_text(&report, "kind"), put_text(&report, "exit");
    put_text(&report, "status"), put_int(&report, status);
    put_text(&report, "reason"), put_text(&report, reason);
    put_text(&report, "hit"), put(&report, "[", 1), put(&report, &count, 4);
    for (uint32_t index = 0; index < count; index++)
        put_text(&report, hits[index]);
    put_text(&report, "wall"), put_float(&report, wall);
    put_text(&report, "cpu"), put_float(&report, seconds_of(used.ru_utime) + seconds_of(used.ru_stime));
    put_text(&report, "memory"), put_bytes_of(&report, (int64_t)used.ru_maxrss * 1024);
    put_text(&report, "fuel"), put(&report, "N", 1);
    put_text(&report, "reported"), put(&report, "F", 1);
    put(&report, "0", 1);
    uint32_t length = __builtin_bswap32(report.length - 4);
    memcpy(report.bytes, &length, 4);
    (void)!send(control, report.bytes, report.length, MSG_NOSIGNAL);
}

/* Stay until the supervisor has closed its end, and a moment longer: the end of the namespaces would compete with it for the processor. */
static void step_aside(void)
{
    struct pollfd end = {control, POLLIN, 0};
    struct timespec moment = {0, MOMENT_NS};
    if (poll(&end, 1, LINGER_MS) > 0)
        nanosleep(&moment, NULL);
}

/* An order of the supervisor: a byte and a double in network order. Return its byte, 0 if the supervisor has gone. */
static char receive_order(double *value)
{
    unsigned char order[9];
    size_t length = 0;
    uint64_t bits;
    while (length < sizeof order) {
        ssize_t part = recv(control, order + length, sizeof order - length, 0);
        if (part <= 0)
            return 0;
        length += part;
    }
    memcpy(&bits, order + 1, 8);
    bits = __builtin_bswap64(bits);
    memcpy(value, &bits, 8);
    return order[0];
}

/* Watch the guest until the run is over, and report; or until Python has to look at limits. Return only in the second case. */
void watch(const struct seat *seat, const struct script *script, pid_t guest, int layers, int woken, struct handover *handover)
{
    enum { WOKEN, CONTROL, KEEPER, SUPERVISOR, SOURCES };
    struct pollfd sources[SOURCES] = {{woken, POLLIN, 0}, {control, POLLIN, 0}, {seat->keeper, POLLIN, 0}, {seat->supervisor, POLLIN, 0}};
    struct signalfd_siginfo information[8];
    const char *reason = "exited", *hit = "";
    double began = now(), deadline = began + FORGOTTEN, look_at = 0;
    int status = SIGKILL, ended = reap(guest, &status);
    while (!ended && !*hit) {
        double until = look_at && look_at < deadline ? look_at : deadline, left = until - now();
        int ready = poll(sources, SOURCES, left <= 0 ? 0 : left > 1e6 ? 1000000000 : (int)(left * 1000) + 1);
        if (ready < 0) {
            if (errno != EINTR && errno != ENOMEM)
                _exit(1); /* and with init everything of its namespace */
            continue;
        }
        if (sources[SUPERVISOR].revents || sources[KEEPER].revents) {
            reason = "killed", hit = "supervisor";
        } else if (sources[CONTROL].revents) {
            double value = 0;
            switch (receive_order(&value)) {
            case GO:
                began = now();
                deadline = began + (value < 4294967296.0 ? value : 4294967296.0);
                if (!look_at) /* later orders only move the deadline: turns that follow one another quickly do not put the look off */
                    look_at = began + script->patience_ms / 1000.0;
                break;
            case SIGNAL:
                kill(-guest, (int)value);
                break;
            default: /* end of the orders: the run is no longer wanted */
                reason = "killed", hit = "supervisor";
            }
        }
        if (sources[WOKEN].revents)
            (void)!read(woken, information, sizeof information);
        ended = reap(guest, &status);
        if (!ended && !*hit) {
            double at = now();
            if (at >= deadline) {
                reason = "timed-out", hit = "wall";
            } else if (look_at && at >= look_at) {
                close(woken);
                handover->kind = WATCH;
                handover->guest = guest;
                handover->layers = layers;
                handover->began = began;
                handover->deadline = deadline;
                handover->notes = script->notes.at;
                handover->notes_length = script->notes.end - script->notes.at;
                return;
            }
        }
    }
    double wall = now() - began;
    int crowded = script->processes != UINT64_MAX && count_tasks() + !!ended >= script->processes;
    end_everything(guest, &status);
    if (!strcmp(reason, "killed") && status != SIGKILL)
        reason = "exited", hit = ""; /* the program had already ended by itself when the order came */
    say_end(script, status, reason, strcmp(hit, "supervisor") ? hit : "", wall, layers, crowded);
    step_aside();
    _exit(0);
}
