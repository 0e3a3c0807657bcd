/* The setup script: values one after another, in the byte order of the machine, each bounded by the script's end. */

#include "helper.h"

int control = -1;

/* Decline: nothing has run, and the supervisor asks the reference. */
void decline(void)
{
    char byte = DECLINED;
    (void)!send(control, &byte, 1, MSG_NOSIGNAL);
    _exit(1);
}

void need(int holds)
{
    if (!holds)
        decline();
}

const void *take(struct cursor *from, size_t size)
{
    const void *here = from->at;
    need((size_t)(from->end - from->at) >= size);
    from->at += size;
    return here;
}

uint32_t take_u32(struct cursor *from)
{
    uint32_t value;
    memcpy(&value, take(from, sizeof value), sizeof value);
    return value;
}

uint64_t take_u64(struct cursor *from)
{
    uint64_t value;
    memcpy(&value, take(from, sizeof value), sizeof value);
    return value;
}

struct cursor take_bytes(struct cursor *from)
{
    uint32_t size = take_u32(from);
    struct cursor part = {take(from, size), NULL};
    part.end = part.at + size;
    return part;
}

/* A string ends with a zero byte, which its length counts, and has no other. */
const char *take_string(struct cursor *from)
{
    struct cursor part = take_bytes(from);
    need(part.end > part.at && memchr(part.at, 0, part.end - part.at) == part.end - 1);
    return (const char *)part.at;
}

struct script read_script(struct cursor from)
{
    struct script read = {.whole = from};
    need(take_u32(&from) == PROTOCOL);
    read.flags = take_u32(&from);
    read.shift = take_u32(&from);
    read.uid = take_u32(&from);
    read.gid = take_u32(&from);
    read.filter = take_u32(&from);
    read.patience_ms = take_u32(&from);
    read.open_files = take_u64(&from);
    read.processes = take_u64(&from);
    read.hostname = take_string(&from);
    read.scratch = take_string(&from);
    read.bounds = take_bytes(&from);
    read.limits = take_bytes(&from);
    read.guest_limits = take_bytes(&from);
    read.ruleset = take_bytes(&from);
    read.ready = take_bytes(&from);
    read.notes = take_bytes(&from);
    read.steps = take_bytes(&from);
    need(from.at == from.end && has_filter(read.filter));
    return read;
}
