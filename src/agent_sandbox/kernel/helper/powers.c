/* Powers: ids, limits, capabilities, rules and filters that a guest has or loses. */

#include "helper.h"

static struct {
    unsigned short length;
    struct sock_filter *code;
} filters[MOST_FILTERS];

void raise_loopback(void)
{
    struct ifreq request = {0};
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    strcpy(request.ifr_name, "lo");
    need(sock >= 0 && ioctl(sock, SIOCGIFFLAGS, &request) == 0);
    request.ifr_flags |= IFF_UP;
    need(ioctl(sock, SIOCSIFFLAGS, &request) == 0);
    close(sock);
}

static void write_file(int directory, const char *name, const char *text)
{
    int file = openat(directory, name, O_WRONLY | O_CLOEXEC);
    need(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
    close(file);
}

/* Enter the guest's own user namespace, which owns nothing. As root the supervisor writes its maps. */
void give_up_identity(const struct script *script, int ourselves)
{
    char byte = HERE, map[64];
    uid_t uid = script->uid;
    gid_t gid = script->gid;
    need(unshare(CLONE_NEWUSER) == 0);
    need(send(control, &byte, 1, MSG_NOSIGNAL) == 1);
    if (recv(control, &byte, 1, 0) != 1 || byte != MAPPED)
        _exit(1); /* the supervisor has gone */
    need(unshare(CLONE_NEWCGROUP) == 0); /* not earlier: only now are we in our cgroup, which becomes the root in /proc/self/cgroup */
    if (script->flags & F_ROOT) {
        need(syscall(SYS_setgroups, 0, NULL) == 0);
    } else {
        write_file(ourselves, "setgroups", "deny");
        snprintf(map, sizeof map, "%u %u 1", uid, uid);
        write_file(ourselves, "uid_map", map);
        snprintf(map, sizeof map, "%u %u 1", gid, gid);
        write_file(ourselves, "gid_map", map);
    }
    close(ourselves);
    need(syscall(SYS_setresgid, gid, gid, gid) == 0 && syscall(SYS_setresuid, uid, uid, uid) == 0);
}

/* Limit the objects that the kernel counts per user. If the settings are read-only, as in most containers, that user's own limit applies. */
void bound_kernel_objects(int settings, struct cursor from)
{
    while (from.at < from.end) {
        const char *name = take_string(&from), *most = take_string(&from);
        int file = openat(settings, name, O_WRONLY | O_CLOEXEC);
        if (file < 0)
            continue;
        need(write(file, most, strlen(most)) == (ssize_t)strlen(most));
        close(file);
    }
    close(settings);
}

/* Limits only go down, and never beyond the present hard limit, so no capability is needed. Return whether all hold. */
int lower_limits(struct cursor from)
{
    while (from.at < from.end) {
        struct rlimit now, wanted;
        uint32_t kind = take_u32(&from);
        wanted.rlim_cur = take_u64(&from);
        wanted.rlim_max = take_u64(&from);
        if (getrlimit(kind, &now) != 0)
            return 0;
        if (wanted.rlim_cur > now.rlim_max)
            wanted.rlim_cur = now.rlim_max;
        if (wanted.rlim_max > now.rlim_max)
            wanted.rlim_max = now.rlim_max;
        if (setrlimit(kind, &wanted) != 0)
            return 0;
    }
    return 1;
}

/* Raise our own limit as far as allowed: the kernel bounds descriptors in flight by the sender's. Return that of the guest. */
rlim_t make_room_for_descriptors(uint64_t asked)
{
    const rlim_t most = 1 << 20;
    struct rlimit now, wanted;
    need(getrlimit(RLIMIT_NOFILE, &now) == 0);
    wanted.rlim_cur = wanted.rlim_max = now.rlim_max < most ? most : now.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &wanted) != 0) {
        wanted.rlim_cur = wanted.rlim_max = now.rlim_max;
        need(setrlimit(RLIMIT_NOFILE, &wanted) == 0);
    }
    return asked < now.rlim_max ? asked : now.rlim_max;
}

int has_capabilities(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data) != 0)
        return 1;
    errno = EPERM;
    return (data[0].effective | data[0].permitted | data[0].inheritable | data[1].effective | data[1].permitted | data[1].inheritable) != 0;
}

/* Drop every capability for good, with every way by which a program started later could regain one. */
void drop_capabilities(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct nothing[2] = {{0}};
    unsigned long on = SECBIT_NOROOT | SECBIT_NO_SETUID_FIXUP | SECBIT_NO_CAP_AMBIENT_RAISE;
    for (unsigned long number = 0;; number++)
        if (prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0) {
            need(errno == EINVAL && number > 0); /* no such capability, and none with a higher number */
            break;
        }
    need(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) == 0);
    on |= SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED | SECBIT_KEEP_CAPS_LOCKED;
    need(prctl(PR_SET_SECUREBITS, on, 0, 0, 0) == 0);
    need(syscall(SYS_capset, &header, nothing) == 0);
}

/* Return a descriptor of the Landlock rules; -1 if this kernel has none to enforce. They bind nobody yet. */
int open_ruleset(struct cursor from)
{
    struct {
        uint64_t files, network, scoped;
    } attributes = {0};
    attributes.files = take_u64(&from); /* one by one: within an initializer the order is the compiler's */
    attributes.scoped = take_u64(&from);
    uint64_t of_a_file = take_u64(&from);
    if (!attributes.files && !attributes.scoped)
        return -1;
    int ruleset = syscall(NR_landlock_create_ruleset, &attributes, sizeof attributes, 0);
    need(ruleset >= 0);
    while (from.at < from.end) {
        struct {
            uint64_t allowed;
            int32_t parent;
        } __attribute__((packed)) rule;
        struct stat status;
        const char *path = take_string(&from);
        rule.allowed = take_u64(&from);
        rule.parent = open(path, O_PATH | O_CLOEXEC);
        need(rule.parent >= 0 && fstat(rule.parent, &status) == 0);
        if (!S_ISDIR(status.st_mode))
            rule.allowed &= of_a_file;
        need(syscall(NR_landlock_add_rule, ruleset, 1, &rule, 0) == 0);
        close(rule.parent);
    }
    return ruleset;
}

void default_signals(uint64_t handled)
{
    sigset_t none;
    struct sigaction action = {0};
    for (int number = 1; number <= 64; number++)
        if (handled >> (number - 1) & 1) {
            action.sa_handler = SIG_DFL;
            need(sigaction(number, &action, NULL) == 0);
        }
    sigemptyset(&none);
    need(sigprocmask(SIG_SETMASK, &none, NULL) == 0);
}

static int ascending(const void *one, const void *other)
{
    return *(const int *)one - *(const int *)other;
}

/* Close every descriptor from 3 upwards but these. Sorts them. */
void close_others(int *kept, int count)
{
    unsigned int lowest = 3;
    qsort(kept, count, sizeof *kept, ascending);
    for (int index = 0; index < count; index++) {
        if (kept[index] < 0 || (unsigned int)kept[index] < lowest)
            continue;
        if ((unsigned int)kept[index] > lowest)
            need(syscall(NR_close_range, lowest, kept[index] - 1, 0) == 0);
        lowest = kept[index] + 1;
    }
    need(syscall(NR_close_range, lowest, ~0u, 0) == 0);
}

/* Keep a copy of a seccomp filter, for scripts that name its number. Return 0, or -1 if there is no room. */
int setup_keep_filter(uint32_t number, const void *code, uint32_t instructions)
{
    size_t size = instructions * sizeof(struct sock_filter);
    if (number >= MOST_FILTERS || filters[number].code || instructions > USHRT_MAX || !(filters[number].code = malloc(size)))
        return -1;
    memcpy(filters[number].code, code, size);
    filters[number].length = instructions;
    return 0;
}

int has_filter(uint32_t number)
{
    return number < MOST_FILTERS && filters[number].code != NULL;
}

/* Put this process under a filter for good. Return 0, or what seccomp(2) says. */
long install_filter(uint32_t number)
{
    struct sock_fprog program = {filters[number].length, filters[number].code};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}
