/* What the files of the setup helper share. See setup.c. */

#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define PROTOCOL 1 /* the same as in setup_script.py: of the script, of struct seat and of struct handover */

#define EXPORT __attribute__((visibility("default")))
#define NR_open_tree 428
#define NR_move_mount 429
#define NR_close_range 436
#define NR_mount_setattr 442
#define NR_landlock_create_ruleset 444
#define NR_landlock_add_rule 445
#define NR_landlock_restrict_self 446
#define TREE_CLONE 1u
#define MOVE_EMPTY_PATH 4u
#define MOVE_TO_LINKED 0x10u /* follow a link in the target's path, as mount(2) does: ours are of /proc/self/fd */
#define ATTR_RDONLY 1ull
#define ATTR_NOSUID 2ull
#define ATTR_NODEV 4ull
#define ATTR_IDMAP 0x00100000ull
#define MOST_DESCRIPTORS 128
#define MOST_FILTERS 8
#define LARGEST_SCRIPT (8u << 20)
#define PATH_ROOM (PATH_MAX + 64)

/* One byte each, as in wire.py. */
#define HERE 'h'
#define MAPPED 'm'
#define DECLINED 'x'
#define GO 'g'
#define SIGNAL 's'
#define IS_SCRIPT 0x80000000u /* in the length of a message */

#define QUIET (MS_NOSUID | MS_NODEV)
#define FORGOTTEN 900.0 /* seconds after which a guest that never gets GO is ended */
#define LINGER_MS 50    /* that init stays after its report, at most, until the supervisor has closed its end */
#define MOMENT_NS 2000000

/* Of Python's own fork: after it, locks and the list of threads are those of a process with one thread. */
extern void PyOS_BeforeFork(void);
extern void PyOS_AfterFork_Parent(void);
extern void PyOS_AfterFork_Child(void);

enum { TAKE_OVER = 1, GUEST = 2, WATCH = 3 };
enum { F_ROOT = 1, F_READABLE = 2, F_USERXATTR = 4, F_PYTHON = 8 };

struct seat {
    int32_t control, payload, supervisor, keeper, userns;
    int32_t stdio[3];
    uint64_t handled; /* a bit for each signal, the lowest for signal 1, that has a handler in the keeper */
};

struct handover {
    int32_t kind;
    int32_t python; /* whether the guest is a Python program */
    int32_t guest, layers;
    uint32_t length; /* of the message that Python is to take over */
    int32_t count, descriptors[MOST_DESCRIPTORS];
    double began, deadline;
    const void *notes; /* what the supervisor wrote for the code that goes on in Python */
    uint32_t notes_length;
};

struct mount_attributes {
    uint64_t set, clear, propagation, userns;
};

struct cursor {
    const unsigned char *at, *end;
};

struct script {
    uint32_t flags, shift, uid, gid, filter, patience_ms;
    uint64_t open_files, processes; /* the most tasks beside init, if init has to count them; else UINT64_MAX */
    const char *hostname, *scratch;
    struct cursor whole, bounds, limits, guest_limits, ruleset, ready, notes, steps;
};

struct site {
    const struct script *script;
    int userns, masks; /* a descriptor of mask layers that an earlier run made, or -1 */
    int number;
};

/* script.c */
extern int control; /* the socket to the supervisor */
void decline(void) __attribute__((noreturn));
void need(int holds);
const void *take(struct cursor *from, size_t size);
uint32_t take_u32(struct cursor *from);
uint64_t take_u64(struct cursor *from);
struct cursor take_bytes(struct cursor *from);
const char *take_string(struct cursor *from);
struct script read_script(struct cursor from);

/* view.c */
void enter_private_mounts(void);
void perform(struct site *site);
void enter_root(void);

/* powers.c */
void raise_loopback(void);
void give_up_identity(const struct script *script, int ourselves);
void bound_kernel_objects(int settings, struct cursor from);
int lower_limits(struct cursor from);
rlim_t make_room_for_descriptors(uint64_t asked);
int has_capabilities(void);
void drop_capabilities(void);
int open_ruleset(struct cursor from);
int has_filter(uint32_t number);
long install_filter(uint32_t number);
void default_signals(uint64_t handled);
void close_others(int *kept, int count);

/* watch.c */
void watch(const struct seat *seat, const struct script *script, pid_t guest, int layers, int woken, struct handover *handover);

/* For Python: see kernel/setup_helper.py. */
EXPORT int setup_protocol(void);
EXPORT const char *setup_sources(void);
EXPORT int setup_keep_filter(uint32_t number, const void *code, uint32_t instructions);
EXPORT long setup_begin(const struct seat *seat, unsigned long namespaces, struct handover *handover);
