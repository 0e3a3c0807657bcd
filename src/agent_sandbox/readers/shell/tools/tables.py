"""The table of known tools, by name. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agent_sandbox.readers.shell.effects import Effect, EffectKind, Spec
from agent_sandbox.readers.shell.expansion import Field
from agent_sandbox.readers.shell.tools import special

Tool = Spec | Callable[[Sequence[Field]], list[Effect]]

_READS, _WRITES, _DESTROYS, _NETWORK = EffectKind.READS, EffectKind.WRITES, EffectKind.DESTROYS, EffectKind.NETWORK
_CODE, _SYSTEM = EffectKind.RUNS_CODE, EffectKind.SYSTEM
_NOTHING = Spec(operands=None)


def _named(names: str, tool: Tool) -> dict[str, Tool]:
    return dict.fromkeys(names.split(), tool)


def _subcommands(**kinds: str) -> dict[str, Spec]:
    """Return specs of subcommands. Each keyword is a kind of effect, its value the subcommands that have it. Operands are not files."""
    specs: dict[str, Spec] = {}
    for name, listed in kinds.items():
        for word in listed.split():
            before = specs.get(word)
            specs[word] = Spec(operands=None, always=(*(before.always if before else ()), EffectKind[name.upper()]))
    return specs


def _package_manager(install: str, local: str, remove: str, code: str = "", valued: str = "") -> Spec:
    """Return the spec of a package manager, given its subcommands.

    Those in `install` fetch, write and run code of the packages; `local` only read; `remove` delete; `code` run code of the project.
    """
    return Spec(
        subcommands=_subcommands(
            reads=local, writes=f"{install} {remove}", network=install, runs_code=f"{install} {code}", destroys=remove
        ),
        valued=valued,
    )


_PIP = _package_manager("install download wheel", "list show freeze check config debug help search index cache inspect hash", "uninstall")
_NPM = _package_manager(
    "install i ci add update upgrade up dedupe audit link init create publish",
    "ls list view info outdated why explain config help root prefix bin ping whoami -v --version",
    "uninstall remove rm un prune unpublish",
    "run run-script test start exec t restart stop rebuild dlx x build dev",
    "--prefix -C --workspace -w --dir --cwd",
)
_CARGO = _package_manager(
    "install add update fetch publish build b run r test t check c bench doc clippy fix",
    "tree metadata search locate-project version fmt",
    "clean uninstall remove rm yank",
    valued="--manifest-path --target-dir",
)
_APT = _package_manager(
    "install add update upgrade dist-upgrade full-upgrade source build-dep",
    "list show search policy depends",
    "remove purge autoremove clean",
)
_DOCKER = Spec(
    subcommands=_subcommands(
        reads="ps images logs inspect version info top stats diff port history search events",
        writes="build commit tag cp load save export import create start restart rename update volume network context",
        destroys="rm rmi kill stop prune system image container",
        network="pull push login logout build run search",
        runs_code="run exec build buildx compose compose-up stack swarm service attach",
    ),
    valued="-H --host --context --config -c -l --log-level",
)
_KUBECTL = Spec(
    subcommands=_subcommands(
        network="get describe logs top explain api-resources cluster-info diff apply create patch edit scale rollout set label "
        "annotate expose "
        "delete drain cordon uncordon exec run port-forward cp attach proxy replace taint wait auth debug",
        reads="version config get describe logs top explain diff",
        writes="apply create patch edit scale rollout set label annotate expose run cp cordon uncordon taint config",
        destroys="delete drain replace",
        runs_code="exec run debug attach",
    ),
    valued="-n --namespace --context --kubeconfig -f -o -l --selector --cluster -s --server",
)
_REMOVAL = dict.fromkeys(("delete", "destroy", "purge", "remove", "rm"), _DESTROYS)  # subcommands, by the names that most tools give them
_CLOUD = Spec(operands=None, always=(_NETWORK,), adds={"--delete": _DESTROYS, "--force": _DESTROYS, "rb": _DESTROYS, **_REMOVAL})
_ARCHIVE = Spec(operands=_WRITES, instead={"-c": _READS, "--stdout": _READS, "-l": _READS, "-t": _READS, "-k": _READS})
_GREP = Spec(
    skip=1, valued="-e -f -A -B -C -m --include --exclude --exclude-dir -g -t -T --type --glob -d --color --max-count", unless="-e -f"
)
_SERVICE = Spec(
    subcommands=_subcommands(
        reads="status show list-units is-active is-enabled cat",
        system="start stop restart reload enable disable mask daemon-reload edit kill",
    ),
    otherwise=_SYSTEM,
)

TOOLS: Mapping[str, Tool] = {
    # files that are only read
    **_named("cat tac nl less more bat wc file stat md5sum sha1sum sha256sum sha512sum cksum b2sum rev look", Spec()),
    **_named("head tail", Spec(valued="-n -c --lines --bytes")),
    **_named("od xxd hexdump strings", Spec(valued="-N -j -t -A -s -l -c -n")),
    **_named("ls ll dir vdir exa eza lsd", Spec(valued="-I -w")),
    **_named("tree", Spec(valued="-L -I -P")),
    **_named("du", Spec(valued="-d --max-depth -t -X")),
    **_named("grep egrep fgrep rg ag ack zgrep", _GREP),
    **_named("diff cmp comm colordiff sdiff", Spec(valued="-U -C -x -I -W")),
    **_named("join paste cut column fold fmt expand unexpand", Spec(valued="-d -f -c -b -s -t -w -1 -2 -o")),
    **_named("uniq", Spec(valued="-f -s -w")),
    **_named("readlink realpath", Spec(valued="--relative-to --relative-base")),
    **_named("jq", Spec(skip=1, valued="--arg --argjson --slurpfile -f --from-file --indent")),
    **_named("yq xmllint", Spec(skip=1, adds={"-i": _WRITES, "--in-place": _WRITES}, outputs="-o --output")),
    **_named("sort", Spec(valued="-k -t -S -T --key --compress-program", outputs="-o --output", adds={"--compress-program": _CODE})),
    **_named("shuf", Spec(valued="-n -i", outputs="-o --output")),
    **_named("base64 base32", Spec(valued="-w --wrap")),
    **_named(
        "tr seq yes sleep date cal uname hostname whoami id groups users who w uptime arch nproc tty basename dirname "
        "printenv expr factor locale",
        _NOTHING,
    ),
    **_named(
        "which whereis type apropos man info whatis ps top htop free df lsof lscpu lsblk lsusb lspci vmstat iostat pgrep pidof tput clear",
        _NOTHING,
    ),
    **_named("echo printf test [ true false pwd numfmt getconf getent bc dc", _NOTHING),
    **_named("eslint flake8 pylint mypy pyright shellcheck hadolint", Spec(adds={"--fix": _WRITES})),
    **_named("cloc tokei scc nm objdump readelf ldd size", Spec()),
    # files that are written
    **_named("touch", Spec(operands=_WRITES, valued="-t -d -r --date --reference")),
    **_named("mkdir mkfifo mknod tee", Spec(operands=_WRITES, valued="-m --mode")),
    **_named("mktemp", Spec(operands=_WRITES, always=(_WRITES,), valued="-p --tmpdir --suffix")),
    **_named("truncate fallocate", Spec(operands=_WRITES, valued="-s -r -l -o --size --length")),
    **_named("cp ln", Spec(last=_WRITES, valued="-S", outputs="-t --target-directory")),
    **_named("install", Spec(last=_WRITES, valued="-m -o -g -S", outputs="-t --target-directory", instead={"-d": _WRITES})),
    **_named("mv rename", Spec(operands=_DESTROYS, last=_WRITES, valued="-S", outputs="-t --target-directory")),
    **_named("chmod chown chgrp chattr setfacl", Spec(operands=_WRITES, skip=1, valued="--reference --from -m -x")),
    **_named("rm rmdir unlink srm wipe", Spec(operands=_DESTROYS)),
    **_named("shred", Spec(operands=_DESTROYS, valued="-n --iterations -s --size")),
    **_named("split csplit", Spec(always=(_WRITES,), valued="-b -l -n -C -a -d --filter", adds={"--filter": _CODE})),
    **_named("patch", Spec(always=(_WRITES,), valued="-p -d -i", outputs="-o")),
    **_named("gzip gunzip bzip2 bunzip2 xz unxz zstd unzstd lz4 compress uncompress", _ARCHIVE),
    **_named("zcat bzcat xzcat zstdcat zless", Spec()),
    **_named("zip", Spec(always=(_WRITES,), valued="-TT --unzip-command", adds={"-m": _DESTROYS, "-TT": _CODE, "--unzip-command": _CODE})),
    **_named("unzip", Spec(always=(_WRITES,), valued="-d -x", instead={"-l": _READS})),
    **_named("7z 7za unrar", Spec(operands=None, always=(_READS, _WRITES))),
    **_named("cpio", Spec(operands=None, always=(_READS, _WRITES))),
    **_named("vim vi nvim nano emacs ed ex code pico", Spec(operands=_WRITES, always=(_CODE,), valued="-c -u -S")),
    **_named("dos2unix unix2dos", Spec(operands=_WRITES)),
    **_named(
        "black ruff isort prettier gofmt rustfmt clang-format autopep8 yapf",
        Spec(operands=_WRITES, valued="-l --line-length --config", instead={"--check": _READS, "--diff": _READS}),
    ),
    **_named("convert magick ffmpeg pandoc wkhtmltopdf dot", Spec(last=_WRITES, outputs="-o --output", valued="-i -f -t -c:v -c:a")),
    "sed": special.sed,
    **_named("awk gawk mawk nawk", special.awk),
    **_named("find fd fdfind", special.find),
    **_named("tar bsdtar gtar", special.tar),
    "dd": special.dd,
    # programs, code and builds
    **_named("python python3 python2 pypy pypy3 python3.10 python3.11 python3.12 python3.13", special.interpreter("python", "-c", "-m")),
    **_named("node nodejs deno bun tsx ts-node", special.interpreter("node", "-e", "--eval", "-p", "--print")),
    **_named(
        "ruby irb perl php lua luajit Rscript julia elixir runghc scala groovy java kotlin swift osascript tclsh expect",
        special.interpreter("code", "-e", "-E", "-r"),
    ),
    **_named("bash sh dash zsh ksh ash fish csh tcsh", special.interpreter("shell", "-c")),
    **_named(
        "make gmake ninja cmake meson bazel scons ant gradle gradlew mvn mvnw sbt tox nox pytest jest mocha vitest "
        "rspec rake just task invoke fab phpunit ctest",
        Spec(operands=None, always=(_READS, _WRITES, _CODE)),
    ),
    **_named("gcc g++ cc c++ clang clang++ rustc ld as javac tsc swiftc", Spec(always=(_WRITES,), outputs="-o", valued="-I -L -l -D")),
    "ghc": Spec(always=(_WRITES,), outputs="-o", valued="-I -L -l -D -e", adds={"-e": _CODE, "--interactive": _CODE, "--run": _CODE}),
    "go": _package_manager("get install mod build run test generate vet work", "list env version doc fmt help", "clean"),
    "ctags": Spec(always=(_WRITES,)),
    "gdb": Spec(always=(_CODE, EffectKind.PROCESSES)),
    **_named("strace ltrace perf", Spec(always=(EffectKind.PROCESSES,))),
    # packages
    **_named("pip pip3 pipx", _PIP),
    "uv": Spec(
        subcommands={
            **_subcommands(
                reads="tree version help",
                runs_code="run tool sync build",
                network="add sync lock tool run python self publish",
                writes="add remove sync lock init venv tool build cache python",
            ),
            "pip": _PIP,
        }
    ),
    **_named(
        "poetry pipenv pdm hatch rye conda mamba",
        _package_manager(
            "install add update lock sync build publish create",
            "show list check info env version config",
            "remove uninstall clean",
            "run shell",
        ),
    ),
    **_named("npm pnpm yarn", _NPM),
    **_named("npx bunx pnpx uvx", Spec(operands=None, always=(_NETWORK, _CODE))),
    **_named(
        "gem bundle bundler composer",
        _package_manager(
            "install update add require create-project push",
            "list show info outdated check search which",
            "uninstall remove cleanup clean",
            "exec run-script run",
        ),
    ),
    "cargo": _CARGO,
    **_named("apt apt-get aptitude apk dnf yum zypper", _APT),
    "pacman": Spec(operands=None, always=(_NETWORK, _WRITES, _CODE), adds={"-R": _DESTROYS}),
    **_named(
        "dpkg rpm",
        Spec(
            operands=None,
            adds={"-i": _CODE, "--install": _CODE, "-r": _DESTROYS, "--remove": _DESTROYS, "-P": _DESTROYS, "-e": _DESTROYS, "-U": _CODE},
        ),
    ),
    **_named(
        "brew snap flatpak",
        _package_manager("install update upgrade tap reinstall", "list info search doctor outdated", "uninstall remove cleanup"),
    ),
    # network
    "curl": special.curl,
    "wget": special.wget,
    "ssh": special.ssh,
    "rsync": special.rsync,
    **_named("scp sftp", Spec(last=_WRITES, always=(_NETWORK,), valued="-P -i -o -F -J")),
    **_named(
        "ftp telnet ping ping6 traceroute tracepath mtr dig nslookup host whois nmap http https httpie aria2c lynx w3m links",
        Spec(operands=None, always=(_NETWORK,)),
    ),
    **_named(
        "nc ncat netcat socat",
        Spec(operands=None, always=(_NETWORK,), adds={"-e": _CODE, "-c": _CODE, "--exec": _CODE, "--sh-exec": _CODE}),
    ),
    **_named("gh glab hub", Spec(operands=None, always=(_NETWORK,), adds=_REMOVAL)),
    **_named("aws gcloud az doctl heroku fly flyctl vercel netlify firebase s3cmd rclone wrangler supabase", _CLOUD),
    **_named(
        "terraform tofu pulumi ansible ansible-playbook cdk sam serverless helm",
        Spec(operands=None, always=(_NETWORK, _CODE, _WRITES), adds={"-destroy": _DESTROYS, "uninstall": _DESTROYS, **_REMOVAL}),
    ),
    **_named("mail sendmail mutt", Spec(operands=None, always=(_NETWORK,))),
    **_named("tcpdump wireshark tshark ngrep", Spec(operands=None, always=(_NETWORK,), outputs="-w")),
    "openssl": Spec(
        operands=None, outputs="-out", valued="-in -inkey -key", adds=dict.fromkeys(("s_client", "s_server", "s_time", "ocsp"), _NETWORK)
    ),
    "certbot": Spec(operands=None, always=(_NETWORK, _WRITES), adds={"delete": _DESTROYS}),
    "gpg": Spec(
        always=(_WRITES,),
        outputs="-o --output",
        adds={
            **dict.fromkeys(("--recv-keys", "--send-keys", "--search-keys", "--refresh-keys", "--fetch-keys"), _NETWORK),
            **dict.fromkeys(("--delete-keys", "--delete-secret-keys"), _DESTROYS),
        },
    ),
    **_named("age ssh-keygen", Spec(operands=_READS, always=(_WRITES,), outputs="-o --output -f")),
    # databases
    **_named("psql mysql mariadb mongosh mongo clickhouse-client cockroach sqlcmd", special.database),
    **_named(
        "redis-cli",
        Spec(operands=None, always=(_NETWORK, _WRITES), adds=dict.fromkeys(("flushall", "FLUSHALL", "flushdb", "FLUSHDB"), _DESTROYS)),
    ),
    "sqlite3": special.sqlite,
    **_named("pg_dump mysqldump mongodump", Spec(operands=None, always=(_NETWORK,), outputs="-f --file --result-file -o")),
    **_named("dropdb pg_restore", Spec(operands=None, always=(_NETWORK, _DESTROYS))),
    "createdb": Spec(operands=None, always=(_NETWORK, _WRITES)),
    # containers and clusters
    **_named("docker podman nerdctl", _DOCKER),
    "docker-compose": Spec(operands=None, always=(_NETWORK, _CODE)),
    "kubectl": _KUBECTL,
    **_named("minikube kind k3d vagrant", Spec(operands=None, always=(_NETWORK, _CODE, _SYSTEM))),
    # the machine
    **_named("kill killall pkill skill xkill renice", Spec(operands=None, always=(EffectKind.PROCESSES,))),
    **_named("systemctl service", _SERVICE),
    **_named(
        "mount umount swapon swapoff modprobe insmod rmmod sysctl iptables ip6tables nft ufw useradd userdel usermod "
        "groupadd passwd chpasswd visudo",
        Spec(operands=None, always=(_SYSTEM,)),
    ),
    **_named("crontab at batch", Spec(operands=_READS, always=(_SYSTEM,), instead={"-l": None})),
    **_named(
        "reboot shutdown halt poweroff init telinit hostnamectl timedatectl loginctl update-alternatives ldconfig",
        Spec(operands=None, always=(_SYSTEM,)),
    ),
    **_named(
        "mkfs mkfs.ext4 mkfs.xfs mkfs.btrfs mke2fs mkswap fdisk parted sfdisk gdisk wipefs blkdiscard cryptsetup",
        Spec(operands=_DESTROYS, valued="-t -L"),
    ),
    **_named("ip ifconfig route iwconfig ss netstat arp", Spec(operands=None)),
    **_named("journalctl dmesg last lastlog history", Spec(operands=None, always=(_READS,))),
    **_named("xdg-open open xclip xsel pbcopy pbpaste notify-send", Spec(operands=None, always=(_SYSTEM,))),
    **_named("screen tmux", Spec(operands=None, always=(_CODE,))),
    "git": special.git,
}
