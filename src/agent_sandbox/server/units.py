"""systemd: the units of the daemon as text, and the messages to the service manager about its state."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress

KINDS = ("user", "system")
_SERVICE = """\
[Service]
Type=notify
ExecStart={program} serve --http --log json
Restart=on-failure
# What runs in a sandbox gets a control group of its own below that of the service, and one that is out of memory ends alone.
Delegate=yes
OOMPolicy=continue
# The daemon is asked to stop and ends what it performs; whatever is left after that is killed.
KillMode=mixed
TimeoutStopSec=60
# No NoNewPrivileges=, no SystemCallFilter= and no limits here: the daemon performs only what comes from callers with the same ones.
"""
_USER = """\
# ~/.config/systemd/user/agent-sandbox.service, then: systemctl --user enable --now agent-sandbox
[Unit]
Description=Agent Sandbox

{service}
[Install]
WantedBy=default.target
"""
_SYSTEM = """\
# /etc/systemd/system/agent-sandbox@.service, then for each user: systemctl enable --now agent-sandbox@USER
[Unit]
Description=Agent Sandbox of %i

{service}User=%i

[Install]
WantedBy=multi-user.target
"""


def unit(kind: str) -> str:
    """Return a unit that starts this installation: for the manager of a user, or a template for the machine's, with a user as instance."""
    script = os.path.abspath(sys.argv[0])
    program = [script] if os.access(script, os.X_OK) and os.path.isfile(script) else [sys.executable, "-m", "agent_sandbox"]
    service = _SERVICE.format(program=" ".join(shlex.quote(word).replace("%", "%%") for word in program))
    return (_USER if kind == "user" else _SYSTEM).format(service=service)


def notify(message: str) -> None:
    """Tell the service manager, if one has started us: READY=1, or STOPPING=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:  # it has gone
        manager.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
