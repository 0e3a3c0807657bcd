"""What a program finds when it looks around for a way out: a probe that prints one line for each thing, the same on every machine.

It runs inside and outside alike. Numbers that differ from machine to machine are reduced to what matters of them: whether a namespace is
the machine's, whether a mount can hold devices or setuid programs, whether a path can be written.
"""

from __future__ import annotations

import os

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")

_SOURCE = r"""
import ctypes, errno, glob, json, os, re, resource, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
lines = []
def say(kind, text): lines.append(f"{kind}: {text}")
def read(path, size=4096):
    try:
        with open(path, "rb", buffering=0) as file: return file.read(size).decode(errors="replace")
    except OSError: return ""
def writable(path):
    if stat.S_ISCHR(os.stat(path).st_mode): return False  # masked: it is /dev/null
    try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError: return False
    return True

for name, host in HOST.items():
    say("namespace", f"{name} " + ("of the machine" if os.readlink(f"/proc/self/ns/{name}") == host else "its own"))
status = dict(line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line)
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Groups"):
    say("process", f"{name} {status.get(name, '').strip()}")
say("process", f"securebits {libc.prctl(27, 0, 0, 0, 0):#x}")
say("process", f"tracer {status['TracerPid']}, parent {os.getppid()}, processes {sum(name.isdecimal() for name in os.listdir('/proc'))}")
say("process", "ids mapped " + " ".join(line.split()[2] for line in read("/proc/self/uid_map").splitlines()))
say("process", "setgroups " + read("/proc/self/setgroups").strip())
for name in ("CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NICE", "RTPRIO"):
    say("limit", f"{name} {resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[1]}")
say("cgroup", "paths " + " ".join(sorted({line.split(":", 2)[2] for line in read("/proc/self/cgroup").splitlines()})))

# Mounts: those of our making by name, the rest by what they have in common.
OURS = ("/", "/dev", "/dev/pts", "/dev/shm", "/proc", "/run", "/sys", "/tmp")
others = set()
for line in open("/proc/self/mountinfo"):
    left, right = line.split(" - ")
    target, options, kind = left.split()[4], left.split()[5].split(","), right.split()[0]
    flags = " ".join(sorted(set(options) & {"ro", "rw", "nosuid", "nodev", "noexec"}))
    shared = " shared" if re.search(r" (shared|master|propagate_from):", left) else ""
    if target in OURS: say("mount", f"{target} {kind} {flags}{shared}")
    elif target.startswith("/dev/"): others.add(f"below /dev {flags}{shared}")
    elif target.startswith("/proc/"): say("mount", f"{target} {kind} {flags}{shared}")
    elif kind == "overlay": others.add(f"elsewhere an overlay, {' '.join(sorted(set(flags.split()) - {'ro', 'rw', 'noexec'}))}{shared}")
    else: others.add(f"elsewhere {'a directory' if os.path.isdir(target) else 'a file'} of the machine, {flags}{shared}")
for each in sorted(others): say("mounts", each)

for path in sorted(glob.glob("/dev/*")):
    node = os.lstat(path)
    special = stat.S_ISCHR(node.st_mode) or stat.S_ISBLK(node.st_mode)
    say("device", path + (f" {'cb'[stat.S_ISBLK(node.st_mode)]} {os.major(node.st_rdev)}:{os.minor(node.st_rdev)}" if special else ""))

for top in ("/sys", "/proc") if INSIDE else ("/proc/sys/kernel",):
    for directory, below, names in os.walk(top):
        below[:] = [name for name in below if directory != "/proc" or not name.isdecimal() and name not in ("self", "thread-self")]
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path) and writable(path): say("writable", path)
for name in ("kcore", "kmsg", "keys", "key-users", "timer_list", "sched_debug", "slabinfo", "kpagecount", "kpageflags",
             "kpagecgroup", "vmallocinfo", "sysrq-trigger", "latency_stats", "scsi/scsi", "acpi", "asound", "1/environ", "1/mem", "1/maps",
             "1/root/etc/passwd", "1/cwd/.", "1/fd/0"):
    if read("/proc/" + name, 64): say("readable", "/proc/" + name)
for name in ("kallsyms", "modules", "iomem"):
    if re.search(r"(^|0x|-)0*[1-9a-f][0-9a-f]{7}", read("/proc/" + name, 1 << 16), re.M): say("readable", f"addresses in /proc/{name}")
for path in ("/sys/fs/cgroup", "/sys/kernel/debug", "/sys/kernel/security", "/sys/fs/bpf", "/sys/firmware", "/sys/class", "/dev/mem",
             "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/mapper", "/dev/kmsg", "/dev/vsock", "/dev/vhost-vsock", "/dev/userfaultfd",
             "/dev/snapshot", "/run/.containerenv", "/run/secrets", "/var/run/secrets", "/run/systemd", "/run/dbus", "/run/user",
             "/run/lock"):
    if os.path.exists(path): say("exists", path)
sockets = ["docker.sock", "podman/podman.sock", "containerd/containerd.sock", "crio/crio.sock", "dbus/system_bus_socket", "systemd/private",
           "systemd/journal/socket", "systemd/notify", "libvirt/libvirt-sock", "snapd.socket", "cri-dockerd.sock"]
for path in (f"{top}/{name}" for top in ("/run", "/var/run") for name in sockets):
    if os.path.exists(path): say("socket", path)
say("sockets", f"named {sum(len(line.split()) > 7 for line in read('/proc/net/unix', 1 << 20).splitlines()[1:])}")
say("descriptors", " ".join(sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))))

say("network", "interfaces " + " ".join(sorted(name for _, name in socket.if_nameindex())))
say("network", f"routes {max(0, len(read('/proc/net/route').splitlines()) - 1)}")
for address in ("169.254.169.254", "1.1.1.1", "10.0.0.1") if INSIDE else ():
    with socket.socket() as client:
        client.settimeout(1)
        try: client.connect((address, 80)); say("network", f"{address} reached")
        except OSError as error: say("network", f"{address} {errno.errorcode.get(error.errno, 'no answer')}")
say("name", os.uname().nodename)
for name in sorted(os.environ): say("variable", name)
print(json.dumps(lines))
"""


def source(*, inside: bool) -> str:
    """The probe. What is the machine's own is told to it, because from inside nobody can know.

    Outside it does not open all of /sys for writing, where an open alone can have an effect, nor does it call the internet.
    """
    host = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    return f"HOST, INSIDE = {host!r}, {inside}\n" + _SOURCE
