/* The view: the steps of a mount plan, in a fresh mount namespace. See kernel/mount_plan.py for the names in the staging directory. */

#include "helper.h"

static void path_of(char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void path_of(char *path, const char *format, ...)
{
    va_list words;
    va_start(words, format);
    int length = vsnprintf(path, PATH_ROOM, format, words);
    va_end(words);
    need(length >= 0 && length < PATH_ROOM);
}

/* Open a directory of the view, making it if it is missing. One component at a time and through no link: what an earlier run left in its
 * layers could lead to the real machine. */
static int walk(const char *target)
{
    char name[NAME_MAX + 1];
    int here = open("r", O_PATH | O_DIRECTORY | O_CLOEXEC);
    need(here >= 0);
    for (const char *at = target; *at;) {
        size_t length = strcspn(at, "/");
        if (length) {
            need(length <= NAME_MAX);
            memcpy(name, at, length);
            name[length] = 0;
            int next = openat(here, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (next < 0 && errno == ENOENT) {
                need(mkdirat(here, name, 0755) == 0 || errno == EEXIST);
                next = openat(here, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            }
            need(next >= 0);
            close(here);
            here = next;
        }
        at += length;
        at += strspn(at, "/");
    }
    return here;
}

/* Open the parent of a target; `name` becomes its last component. */
static int walk_to_parent(const char *target, const char **name)
{
    char parent[PATH_ROOM];
    const char *slash = strrchr(target, '/');
    need(slash != NULL && slash[1] != 0);
    path_of(parent, "%.*s", (int)(slash - target), target);
    *name = slash + 1;
    return walk(parent);
}

/* Open a regular file of the view as a place to mount on, making an empty one if it is missing. */
static int walk_to_file(const char *target)
{
    const char *name;
    struct stat status;
    int parent = walk_to_parent(target, &name);
    int made = openat(parent, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0755);
    need(made >= 0 || errno == EEXIST);
    if (made >= 0)
        close(made);
    int file = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    need(file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode));
    close(parent);
    return file;
}

static void mount_on(int place, const char *below, const char *source, const char *kind, unsigned long flags, const char *options)
{
    char path[PATH_ROOM];
    path_of(path, "/proc/self/fd/%d%s", place, below);
    need(mount(source, path, kind, flags, options) == 0);
}

/* Return a descriptor of a private, read-only copy of one mount, with the ids of the guest. */
static int clone_of(const char *source, const struct site *site)
{
    struct mount_attributes attributes = {ATTR_NOSUID | ATTR_NODEV | ATTR_RDONLY, 0, 0, 0};
    int tree = syscall(NR_open_tree, AT_FDCWD, source, TREE_CLONE | O_CLOEXEC);
    need(tree >= 0);
    if (site->userns >= 0) { /* never go on without the map: the guest would be the machine's root */
        attributes.set |= ATTR_IDMAP;
        attributes.userns = site->userns;
    }
    need(syscall(NR_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes) == 0);
    return tree;
}

static void attach(int tree, const char *target)
{
    need(syscall(NR_move_mount, tree, "", AT_FDCWD, target, MOVE_EMPTY_PATH | MOVE_TO_LINKED) == 0);
    close(tree);
}

static void attach_at(int tree, int place)
{
    char path[PATH_ROOM];
    path_of(path, "/proc/self/fd/%d", place);
    attach(tree, path);
    close(place);
}

/* Give a directory of a layer the mode and owner of a real one, as far as permitted: an overlay shows those of its uppermost layer. */
static void look_like(const char *path, const struct stat *real)
{
    mode_t mode = real->st_mode & 01777;
    uid_t me = geteuid();
    int given = (me == 0 || me == real->st_uid) && chown(path, real->st_uid, real->st_gid) == 0;
    if (!given && real->st_uid != me) /* we own the copy, so its owner gets what others have of the real one */
        mode = (mode & 01077) | (mode & 07) << 6;
    need(chmod(path, mode) == 0);
}

static void make_layer(const char *path, const char *like)
{
    struct stat real;
    need(mkdir(path, 0700) == 0 && stat(like, &real) == 0);
    look_like(path, &real);
}

/* The findings on which a given mask layer rests: for each path below the lower layer its mode and owner, or that there was nothing. */
enum { NOTHING = 0, SOMETHING = 1, AN_ERROR = 2 };

static void check_finding(const char *lower, struct cursor *from)
{
    char path[PATH_ROOM];
    struct stat status;
    const char *below = take_string(from);
    uint32_t kind = take_u32(from), mode = take_u32(from), uid = take_u32(from), gid = take_u32(from);
    path_of(path, *below ? "%s/%s" : "%s%s", lower, below);
    if (lstat(path, &status) == 0)
        need(kind == SOMETHING && status.st_mode == mode && status.st_uid == uid && status.st_gid == gid);
    else
        need(errno == ENOENT ? kind == NOTHING : kind == AN_ERROR && mode == (uint32_t)errno);
}

/* Make one entry of a mask layer. The supervisor lists the parents of a mask before it, each once, and wider masks before narrower ones. */
enum { PARENT = 0, WHITEOUT = 1, OPAQUE = 2 };

/* Return whether a path is below one that is already hidden, or that is no directory: then there is nothing to do for it. */
static int is_covered(const char *layer, const char *below)
{
    char path[PATH_ROOM];
    struct stat status;
    const char *slash = strrchr(below, '/');
    if (!slash)
        return 0;
    path_of(path, "%s/%.*s", layer, (int)(slash - below), below);
    return lstat(path, &status) != 0 || !S_ISDIR(status.st_mode);
}

static void make_mask(const char *layer, const char *lower, struct cursor *from, const char *opaque)
{
    char place[PATH_ROOM], path[PATH_ROOM];
    struct stat real;
    uint32_t kind = take_u32(from);
    const char *below = take_string(from);
    if (is_covered(layer, below))
        return;
    path_of(place, "%s/%s", layer, below);
    path_of(path, "%s/%s", lower, below);
    if (kind != WHITEOUT) {
        if (lstat(path, &real) == 0) {
            if (S_ISDIR(real.st_mode)) {
                need(mkdir(place, 0700) == 0);
                look_like(place, &real);
                need(kind == PARENT || lsetxattr(place, opaque, "y", 1, 0) == 0);
                return;
            }
            if (kind == PARENT) {
                need(!S_ISLNK(real.st_mode)); /* plans contain resolved paths, so the machine has changed since */
                return;                       /* a file: nothing can be below it */
            }
        } else {
            need(errno == ENOENT);
        }
    }
    need(mknod(place, S_IFCHR, 0) == 0);
}

static void make_directories(const char *layer, const char *below)
{
    char path[PATH_ROOM];
    path_of(path, "%s/%s", layer, below);
    for (char *at = path + strlen(layer) + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            need(mkdir(path, 0777) == 0 || errno == EEXIST);
            *at = '/';
        }
    need(mkdir(path, 0777) == 0 || errno == EEXIST);
}

/* Return in `layer` the path of the mask layer of a step; an empty path if it needs none. */
static void mask_layer(char *layer, uint32_t step, const char *lower, struct site *site, struct cursor *from)
{
    const char *opaque = site->script->flags & F_USERXATTR ? "user.overlay.opaque" : "trusted.overlay.opaque";
    uint32_t needed = take_u32(from);
    struct cursor findings = take_bytes(from), masks = take_bytes(from), places = take_bytes(from), files = take_bytes(from);
    layer[0] = 0;
    if (!needed)
        return;
    if (site->masks >= 0) {
        need(findings.at < findings.end);
        while (findings.at < findings.end)
            check_finding(lower, &findings);
        path_of(layer, "/proc/self/fd/%d/%u", site->masks, step);
        return;
    }
    path_of(layer, "m/%u", step);
    make_layer(layer, lower);
    while (masks.at < masks.end)
        make_mask(layer, lower, &masks, opaque);
    while (places.at < places.end)
        make_directories(layer, take_string(&places));
    while (files.at < files.end) {
        char path[PATH_ROOM];
        path_of(path, "%s/%s", layer, take_string(&files));
        need(mknod(path, 0755 | S_IFREG, 0) == 0);
    }
}

static void perform_overlay(uint32_t step, struct site *site, struct cursor *from)
{
    char lower[32], layer[PATH_ROOM], options[2 * PATH_ROOM], upper[PATH_ROOM] = "";
    const char *source = take_string(from), *target = take_string(from), *key = take_string(from), *recorded = take_string(from);
    uint32_t writable = take_u32(from);
    snprintf(lower, sizeof lower, "l/%d", ++site->number);
    need(mkdir(lower, 0777) == 0);
    attach(clone_of(source, site), lower);
    mask_layer(layer, step, lower, site, from);
    const char *top = *layer ? layer : lower;
    if (writable) {
        char path[PATH_ROOM];
        path_of(path, "u/%s", key);
        need(mkdir(path, 0700) == 0 || errno == EEXIST);
        if (*recorded) { /* the target of a key that is a digest */
            path_of(path, "u/%s/target", key);
            int file = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
            need(file >= 0 && write(file, recorded, strlen(recorded)) == (ssize_t)strlen(recorded));
            close(file);
        }
        path_of(path, "u/%s/upper", key);
        make_layer(path, top);
        path_of(path, "u/%s/work", key);
        need(mkdir(path, 0700) == 0);
        path_of(upper, ",upperdir=u/%s/upper,workdir=u/%s/work", key, key);
    }
    int length = snprintf(options, sizeof options, "lowerdir=%s%s%s%s%s", layer, *layer ? ":" : "", lower, upper,
                          site->script->flags & F_USERXATTR ? ",userxattr" : ",index=off,metacopy=off,redirect_dir=nofollow,xino=off");
    need(length > 0 && (size_t)length < sizeof options);
    int place = walk(target);
    mount_on(place, "", "overlay", "overlay", QUIET | (writable ? 0 : MS_RDONLY), options);
    close(place);
}

static void perform_bind(struct site *site, struct cursor *from)
{
    struct stat status;
    const char *source = take_string(from), *target = take_string(from);
    int file = clone_of(source, site);
    need(fstat(file, &status) == 0 && S_ISREG(status.st_mode)); /* a bound directory or socket would be a hole in the view */
    attach_at(file, walk_to_file(target));
}

static void perform_tmpfs(struct cursor *from)
{
    const char *target = take_string(from), *options = take_string(from);
    int place = walk(target);
    mount_on(place, "", "private", "tmpfs", QUIET, options);
    close(place);
}

static void perform_symlink(struct cursor *from)
{
    const char *name, *target = take_string(from), *to = take_string(from);
    int parent = walk_to_parent(target, &name);
    need(symlinkat(to, parent, name) == 0 || errno == EEXIST);
    close(parent);
}

static void perform_file(struct cursor *from)
{
    char path[PATH_ROOM];
    const char *target = take_string(from);
    struct cursor content = take_bytes(from);
    int place = walk_to_file(target);
    path_of(path, "/proc/self/fd/%d", place);
    int file = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
    need(file >= 0);
    while (content.at < content.end) {
        ssize_t written = write(file, content.at, content.end - content.at);
        need(written > 0);
        content.at += written;
    }
    need(fchmod(file, 0644) == 0);
    close(file);
    close(place);
}

static void perform_skeleton(struct site *site)
{
    need(mount("root", "r", "tmpfs", QUIET, "size=16m,mode=755") == 0);
    if (site->script->shift)
        need(chown("r", site->script->shift, site->script->shift) == 0);
}

static void seal(int place, unsigned long flags)
{
    mount_on(place, "", "", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, NULL);
    close(place);
}

/* A new device node, or where a user namespace may not create one, the machine's, bound. */
static void make_device(int dev, const char *name, unsigned int kind, unsigned int minor_number)
{
    char source[32];
    struct stat status;
    if (mknodat(dev, name, S_IFCHR, makedev(kind, minor_number)) == 0) {
        need(fchmodat(dev, name, 0666, 0) == 0);
        return;
    }
    need(errno == EPERM);
    snprintf(source, sizeof source, "/dev/%s", name);
    int tree = syscall(NR_open_tree, AT_FDCWD, source, TREE_CLONE | O_CLOEXEC);
    need(tree >= 0 && fstat(tree, &status) == 0 && S_ISCHR(status.st_mode));
    int file = openat(dev, name, O_CREAT | O_WRONLY | O_CLOEXEC, 0777);
    need(file >= 0);
    close(file);
    attach_at(tree, openat(dev, name, O_PATH | O_NOFOLLOW | O_CLOEXEC));
}

static void perform_devices(struct cursor *from)
{
    const char *terminals = take_string(from), *shared_memory = take_string(from);
    uint32_t count = take_u32(from);
    int place = walk("/dev");
    mount_on(place, "", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=755");
    close(place);
    int dev = walk("/dev"); /* again: what lies on it now */
    while (count--) {
        const char *name = take_string(from);
        unsigned int major_number = take_u32(from), minor_number = take_u32(from);
        make_device(dev, name, major_number, minor_number);
    }
    for (count = take_u32(from); count--;) {
        const char *name = take_string(from), *to = take_string(from);
        need(symlinkat(to, dev, name) == 0);
    }
    need(mkdirat(dev, "pts", 0777) == 0 && mkdirat(dev, "shm", 0777) == 0);
    mount_on(dev, "/pts", "devpts", "devpts", MS_NOSUID | MS_NOEXEC, terminals);
    mount_on(dev, "/shm", "shm", "tmpfs", QUIET, shared_memory);
    seal(dev, MS_NOSUID | MS_NOEXEC);
}

static void perform_proc(struct cursor *from)
{
    char below[NAME_MAX + 2];
    struct stat status;
    int place = walk("/proc");
    mount_on(place, "", "proc", "proc", QUIET | MS_NOEXEC, NULL);
    close(place);
    int proc = walk("/proc");
    for (uint32_t count = take_u32(from); count--;) {
        const char *name = take_string(from);
        if (fstatat(proc, name, &status, 0) != 0 || !S_ISDIR(status.st_mode))
            continue;
        char path[PATH_ROOM];
        path_of(path, "/proc/self/fd/%d/%s", proc, name);
        need(snprintf(below, sizeof below, "/%s", name) < (int)sizeof below);
        mount_on(proc, below, path, NULL, MS_BIND, NULL);
        mount_on(proc, below, "", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | QUIET | MS_NOEXEC, NULL);
    }
    for (uint32_t count = take_u32(from); count--;) {
        const char *name = take_string(from);
        need(snprintf(below, sizeof below, "/%s", name) < (int)sizeof below);
        if (fstatat(proc, name, &status, 0) != 0) {
            need(errno == ENOENT);
            continue;
        }
        if (S_ISDIR(status.st_mode))
            mount_on(proc, below, "masked", "tmpfs", QUIET | MS_NOEXEC | MS_RDONLY, "size=0,mode=000");
        else
            mount_on(proc, below, "r/dev/null", NULL, MS_BIND, NULL);
    }
    close(proc);
}

void perform(struct site *site)
{
    const struct script *script = site->script;
    struct cursor from = script->steps;
    static const char *const places[] = {"r", "u", "l", "c", "f", "m"};
    for (size_t index = 0; index < sizeof places / sizeof *places; index++)
        need(mkdir(places[index], 0777) == 0);
    need(mount("layers", "u", "tmpfs", QUIET, take_string(&from)) == 0);
    if (script->flags & F_USERXATTR) /* the reference has a note for a kernel whose tmpfs takes none */
        need(setxattr("u", "user.try", "", 0, 0) == 0 && removexattr("u", "user.try") == 0);
    for (uint32_t step = 0; from.at < from.end; step++) {
        switch (take_u32(&from)) {
        case 'o':
            perform_overlay(step, site, &from);
            break;
        case 'b':
            perform_bind(site, &from);
            break;
        case 't':
            perform_tmpfs(&from);
            break;
        case 'd':
            close(walk(take_string(&from)));
            break;
        case 'l':
            perform_symlink(&from);
            break;
        case 'f':
            perform_file(&from);
            break;
        case 'k':
            perform_skeleton(site);
            break;
        case 's':
            seal(walk(take_string(&from)), QUIET);
            break;
        case 'v':
            perform_devices(&from);
            break;
        case 'p':
            perform_proc(&from);
            break;
        default:
            decline();
        }
    }
    if (site->masks >= 0)
        close(site->masks);
}

void enter_private_mounts(void)
{
    need(unshare(CLONE_NEWNS) == 0);
    need(mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    /* Over /sys, which is never part of a view, so it hides nothing that a script needs. */
    need(mount("staging", "/sys", "tmpfs", QUIET, "size=256m,mode=700") == 0);
    need(chdir("/sys") == 0);
}

/* Make `r` the root, and detach everything else: pivot_root(".", ".") stacks the old root on the new one. */
void enter_root(void)
{
    need(chdir("r") == 0 && syscall(SYS_pivot_root, ".", ".") == 0);
    need(umount2(".", MNT_DETACH) == 0 && chdir("/") == 0);
}
