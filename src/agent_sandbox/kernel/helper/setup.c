/* Guest setup without an interpreter: what kernel/guest_setup.py does for the commonest kind of run, from the fork to the guest.
 *
 * The Python code is the reference: it does the same for every kind of run, and this file may be missing. A process that is forked from a
 * Python interpreter and runs Python copies some 500 pages only to find its way around; this code touches some 30.
 *
 * It performs a setup script: a list of steps that the supervisor wrote (kernel/setup_script.py), never a guest. It decides nothing. Whatever
 * is not as the script expects (a missing directory, a refusing kernel, a mask layer that no longer fits) makes it decline: it says so with
 * one byte and exits before a guest exists, and the supervisor has the reference make that guest. So there is one place that explains errors.
 *
 * Three processes come through here:
 *
 *     keeper   calls setup_begin(), which forks init and returns its pid
 *     init     performs the script, forks the guest, watches it for its first moments, and hands a longer run over to Python
 *     guest    confines itself, and returns into Python, which receives the program
 *
 * Every call is checked. The kernel's numbers above 423 are the same on every architecture, so old headers do not matter.
 */

#include "helper.h"

static void refuse(const char *why) __attribute__((noreturn));
static void refuse(const char *why)
{
    char text[160];
    int length = snprintf(text, sizeof text, "125 %s: %s", why, strerror(errno));
    (void)!write(3, text, length);
    _exit(125);
}

/* The last steps, as the guest itself: own session, four descriptors, no capabilities, Landlock, the filter. Ends it if one fails. */
static void confine_guest(const struct seat *seat, const struct script *script, int ruleset, rlim_t open_files)
{
    int ours[4] = {seat->stdio[0], seat->stdio[1], seat->stdio[2], seat->payload}, high[5];
    sigset_t none;
    sigemptyset(&none);
    control = -1;
    if (sigprocmask(SIG_SETMASK, &none, NULL) != 0 || setsid() < 0)
        _exit(125);
    for (int number = 0; number < 4; number++)
        if ((high[number] = fcntl(ours[number], F_DUPFD_CLOEXEC, 64)) < 0)
            _exit(125);
    high[4] = -1;
    if (ruleset >= 0 && (high[4] = fcntl(ruleset, F_DUPFD_CLOEXEC, 64)) < 0)
        _exit(125);
    for (int number = 0; number < 4; number++)
        if (dup3(high[number], number, number < 3 ? 0 : O_CLOEXEC) < 0)
            _exit(125);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        refuse("no_new_privs");
    if (high[4] >= 0 && syscall(NR_landlock_restrict_self, high[4], 0) != 0)
        refuse("landlock_restrict_self");
    if (syscall(NR_close_range, 4u, ~0u, 0) != 0)
        refuse("close_range");
    umask(022);
    if (prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) != 0)
        refuse("dumpable");
    if (has_capabilities())
        refuse("capabilities");
    struct rlimit most = {open_files, open_files};
    if (setrlimit(RLIMIT_NOFILE, &most) != 0 || !lower_limits(script->guest_limits))
        refuse("limits");
    long thread = install_filter(script->filter);
    if (thread != 0) {
        if (thread > 0)
            errno = EBUSY;
        refuse("seccomp");
    }
    munmap((void *)script->whole.at, script->whole.end - script->whole.at);
}

/* Receive the length of the request, and the descriptors that come with it. */
static uint32_t receive_head(struct handover *handover)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
    } ancillary;
    uint32_t length;
    struct iovec part = {&length, sizeof length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    /* Written with one call, so it comes whole; an end of the stream means that the supervisor has gone. */
    if (recvmsg(control, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof length)
        _exit(1);
    handover->count = 0;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each))
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            int count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            need(count <= MOST_DESCRIPTORS - handover->count);
            memcpy(handover->descriptors + handover->count, CMSG_DATA(each), count * sizeof(int));
            handover->count += count;
        }
    return __builtin_bswap32(length);
}

/* Receive a script into memory of its own, which a guest gives back before its program comes. */
static struct cursor receive_script(uint32_t length)
{
    need(length <= LARGEST_SCRIPT);
    unsigned char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    need(memory != MAP_FAILED);
    for (uint32_t had = 0; had < length;) {
        ssize_t part = recv(control, memory + had, length - had, 0);
        if (part <= 0)
            _exit(1); /* the supervisor has gone */
        had += part;
    }
    return (struct cursor){memory, memory + length};
}

static void say_ready(const struct script *script, int layers)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } ancillary = {0};
    struct iovec part = {(void *)script->ready.at, script->ready.end - script->ready.at};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (script->flags & F_READABLE) {
        message.msg_control = &ancillary;
        message.msg_controllen = sizeof ancillary;
        ancillary.header.cmsg_level = SOL_SOCKET;
        ancillary.header.cmsg_type = SCM_RIGHTS;
        ancillary.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&ancillary.header), &layers, sizeof layers);
    }
    /* It fails if the supervisor has gone, or if its user has too many descriptors in flight, which the reference explains. The guest, which
     * has no program yet, ends with us. */
    need(sendmsg(control, &message, MSG_NOSIGNAL) == (ssize_t)part.iov_len);
}

static void act_as_init(const struct seat *seat, struct handover *handover)
{
    char byte = HERE;
    sigset_t children;
    int kept[] = {seat->control, seat->payload,  seat->supervisor, seat->keeper,
                  seat->userns,  seat->stdio[0], seat->stdio[1],   seat->stdio[2]};
    control = seat->control;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0)
        decline();
    default_signals(seat->handled);
    close_others(kept, sizeof kept / sizeof *kept);
    if (send(control, &byte, 1, MSG_NOSIGNAL) != 1)
        _exit(1);
    handover->length = receive_head(handover);
    if (!(handover->length & IS_SCRIPT)) {
        handover->kind = TAKE_OVER;
        return;
    }
    struct script script = read_script(receive_script(handover->length & ~IS_SCRIPT));
    struct site site = {&script, seat->userns, handover->count ? handover->descriptors[0] : -1, 0};
    rlim_t open_files = make_room_for_descriptors(script.open_files);
    int settings = open("/proc/sys/user", O_PATH | O_DIRECTORY | O_CLOEXEC);   /* read-only in the view */
    int ourselves = open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC);
    need(settings >= 0 && ourselves >= 0);
    enter_private_mounts();
    perform(&site);
    int layers = open("u", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* kept across pivot_root: what the run changes is read through it */
    need(layers >= 0);
    enter_root();
    raise_loopback();
    need(sethostname(script.hostname, strlen(script.hostname)) == 0);
    give_up_identity(&script, ourselves);
    bound_kernel_objects(settings, script.bounds);
    /* Changing ids cleared the parent-death signal. Not dumpable: a guest of the same uid must not reach us through /proc/1. */
    need(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0 && prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0);
    need(lower_limits(script.limits));
    drop_capabilities();
    int ruleset = open_ruleset(script.ruleset);
    need(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    need(sigprocmask(SIG_BLOCK, &children, NULL) == 0);
    int woken = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    need(woken >= 0);
    PyOS_BeforeFork();
    pid_t guest = fork();
    need(guest >= 0);
    if (guest == 0) {
        handover->python = !!(script.flags & F_PYTHON);
        confine_guest(seat, &script, ruleset, open_files);
        PyOS_AfterFork_Child();
        handover->kind = GUEST;
        return;
    }
    PyOS_AfterFork_Parent(); /* it calls hooks of modules: now, while the guest has no program that could put files in their way */
    close(seat->payload);
    for (int number = 0; number < 3; number++)
        close(seat->stdio[number]);
    if (ruleset >= 0)
        close(ruleset);
    say_ready(&script, layers);
    watch(seat, &script, guest, layers, woken, handover);
}

int setup_protocol(void)
{
    return PROTOCOL;
}

/* Return the digest of the sources that this was compiled from. */
const char *setup_sources(void)
{
    return SETUP_SOURCES;
}

/* Fork an init into these namespaces, and perform what its supervisor sends. Return its pid, or -errno. Return 0 in a child that goes on
 * in Python, as `handover` says: an init whose request is not a script, an init whose run takes longer, or a guest. */
long setup_begin(const struct seat *seat, unsigned long namespaces, struct handover *handover)
{
#if defined(__x86_64__) || defined(__aarch64__)
    long child = syscall(SYS_clone, namespaces | SIGCHLD, NULL, NULL, NULL, NULL);
#else
    long child = (errno = ENOSYS, -1);
#endif
    if (child != 0)
        return child < 0 ? -errno : child;
    act_as_init(seat, handover);
    return 0;
}
