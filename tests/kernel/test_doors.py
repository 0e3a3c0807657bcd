"""The doors of a guest's network namespace: every address leads there, and nothing else does."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from agent_sandbox.kernel import doors
from tests.kernel.children import in_network_namespace


def connect(address: str, port: int) -> str:
    """Return "connected", or the name of the error."""
    try:
        socket.create_connection((address, port), 30).close()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "connected"


ADDRESSES = ["93.184.215.14", "198.18.1.0", "10.0.0.1", "169.254.169.254", "127.0.0.1", "255.1.2.3", "2001:4860:4860::8888", "fd00::1"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_address_leads_to_the_listener_of_its_port_and_no_other_port_does(address: str) -> None:
    def act() -> tuple[str, str, str, tuple[str, int]]:
        before = connect(address, 443)
        opened = doors.open_doors((80, 443))
        (listener,) = [each for each in opened.listeners if socket.socket(fileno=os.dup(each)).getsockname()[1] == 443]
        reached, other = connect(address, 443), connect(address, 444)
        accepted, _ = socket.socket(fileno=listener).accept()
        return before, reached, other, accepted.getsockname()[:2]

    before, reached, other, wanted = in_network_namespace(act)
    assert before != "connected", "the control: without doors, nobody is there"
    assert (reached, other) == ("connected", "ECONNREFUSED")
    assert wanted == (address if ":" in address else f"::ffff:{address}", 443), "the address that was wanted is known at the door"


@pytest.mark.parametrize("server", ["127.0.0.1", "127.0.0.53", "10.255.255.53", "::1", "2001:db8::53"])
def test_every_name_server_is_ours_and_answers_from_the_address_that_was_asked(server: str) -> None:
    def act() -> tuple[bytes, str]:
        opened = doors.open_doors((443,))
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.connect((server, 53))  # a connected socket takes an answer from this address only
            client.send(b"question")
            resolver = next(sock for sock in (socket.socket(fileno=fd) for fd in opened.resolvers) if sock.family == family)
            data, ancillary, _, sender = resolver.recvmsg(100, socket.CMSG_SPACE(64))
            resolver.sendmsg([b"answer to " + data], ancillary, 0, sender)
            client.settimeout(30)
            return client.recv(100), client.getpeername()[0]

    assert in_network_namespace(act) == (b"answer to question", server)


def test_a_datagram_to_any_other_port_is_refused_at_once() -> None:
    def act() -> str:
        doors.open_doors((443,))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(30)
            client.connect(("93.184.215.14", 443))
            client.send(b"QUIC")
            try:
                return client.recv(1).hex()
            except OSError as error:
                return errno.errorcode[error.errno or 0]

    assert in_network_namespace(act) == "ECONNREFUSED"


def test_a_door_whose_holder_has_gone_refuses_at_once() -> None:
    def act() -> tuple[str, str]:
        opened = doors.open_doors((443,))
        before = connect("93.184.215.14", 443)
        for each in opened.all:
            os.close(each)
        return before, connect("93.184.215.14", 443)

    assert in_network_namespace(act) == ("connected", "ECONNREFUSED")


def test_a_server_of_the_guest_keeps_its_own_ports() -> None:
    def act() -> tuple[str, str]:
        doors.open_doors((80, 443))
        with socket.create_server(("127.0.0.1", 8080)) as own:
            return connect("127.0.0.1", 8080), str(own.getsockname()[1])

    assert in_network_namespace(act) == ("connected", "8080")


@pytest.mark.parametrize("server", ["127.0.0.53", "9.9.9.9", "2001:db8::53"])
def test_a_query_over_tcp_arrives_whichever_server_it_is_for(server: str) -> None:
    def act() -> str:
        doors.open_doors((443,))
        return connect(server, 53)

    assert in_network_namespace(act) == "connected"


def test_the_proxy_listens_at_our_own_address_alone_and_yields_to_a_port_of_the_policy() -> None:
    def act() -> tuple[str, ...]:
        doors.open_doors((443, 3128))
        port = doors.proxy_port((443, 3128))
        with socket.create_server(("127.0.0.1", port)):  # a server of the guest's own
            ours = connect(doors.OWN_ADDRESS, port)
        return str(port), ours, connect("127.0.0.1", port), connect("93.184.215.14", port)

    assert in_network_namespace(act) == ("3129", "connected", "ECONNREFUSED", "ECONNREFUSED")
    assert doors.proxy_port((443,)) == doors.PROXY_PORT == 3128


def test_too_many_ports_are_refused() -> None:
    def act() -> str:
        try:
            doors.open_doors(tuple(range(2000, 2001 + doors.MOST_PORTS)))
        except OSError as error:
            return str(error)
        return ""

    assert "at most 100" in in_network_namespace(act)
