"""Clients that want too much, or take too long, over a scripted engine: a clear answer each, and others unharmed."""

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import threading

import pytest
from serve_support import HANG, Running, post, running, scripted, waited

from pallas_attn.serve import Limits
from pallas_attn.serve.server import allow_files

pytestmark = pytest.mark.once

TEXT = "an answer"
COMPLETION = "/v1/completions"


def answered(connection: socket.socket) -> tuple[int, dict]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def is_well(server: Running, tries: int = 1) -> None:
    """What others ask for is answered meanwhile; where limits are tight, a client on a busy machine may be late too."""
    client = server.client.with_options(max_retries=tries - 1)
    said = client.completions.create(model="tiny", prompt="x", max_tokens=64)
    assert said.choices[0].text == TEXT


def closed(connection: socket.socket) -> bool:
    """Waits until the server has hung up."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize("expects", [False, True])
def test_a_body_of_a_gigabyte_is_refused_unread(expects):
    head = post(COMPLETION, b"", **{"content-length": str(2**30)})
    if expects:  # the client asks before it sends
        head = head.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
    with running(served_=scripted(TEXT)) as server, server.raw() as connection:
        connection.sendall(head)
        status, body = answered(connection)  # not a byte of it was sent
        assert (status, body["error"]["message"]) == (413, "body: expected at most 4194304 bytes, got more")
        is_well(server)


def test_a_body_that_is_sent_all_the_same():
    """64 MiB of it, before the answer is looked at: the server keeps none of them."""
    with running(served_=scripted(TEXT)) as server, server.raw() as connection:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        connection.sendall(post(COMPLETION, b"", **{"content-length": str(2**30)}))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(bytes(2**20))
        assert answered(connection)[0] == 413
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
        assert closed(connection)
        is_well(server)


def test_a_body_of_unsaid_length_is_refused_when_it_is_too_long():
    with running(Limits(max_body=1000), scripted(TEXT)) as server, server.raw() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(3):
            connection.sendall(b"190\r\n" + bytes(400) + b"\r\n")
        assert answered(connection)[0] == 413
        is_well(server)


def test_a_connection_is_used_again_after_a_refusal():
    with running(Limits(max_body=100), scripted(TEXT)) as server, server.raw() as connection:
        for _ in range(3):
            connection.sendall(post(COMPLETION, {"prompt": "x" * 200}))
            assert answered(connection)[0] == 413
            connection.sendall(post(COMPLETION, {"prompt": "x"}))
            assert answered(connection)[0] == 200


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ", "header_timeout"),
        (post(COMPLETION, b"", **{"content-length": "100"}), "body_timeout"),
    ],
)
def test_a_client_that_sends_byte_by_byte(sent, code):
    limits = Limits(header_timeout=0.3, body_timeout=0.3)
    with running(limits, scripted(TEXT)) as server, server.raw() as connection:
        connection.sendall(sent)
        stop = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    connection.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        is_well(server, tries=6)
        status, body = answered(connection)
        assert (status, body["error"]["code"]) == (408, code)
        stop.set()
        dripping.join()
        assert closed(connection)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(stream):
    """Its answer is given up, not kept for it, and everybody else's goes on."""
    limits, says = Limits(write_timeout=0.3), scripted("\0" * 200, burst=1)
    ask = {"prompt": "x", "stream": stream, "max_tokens": 200, "n": 16}
    with running(limits, says, send_buffer=4096) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        # Whole, it fits into what the server keeps for a connection that it is about to close.
        connection.sendall(post(COMPLETION, ask, connection="keep-alive" if stream else "close"))
        said = server.client.completions.create(model="tiny", prompt="x", max_tokens=5)
        assert said.usage.completion_tokens == 5
        inside = server.app.gate.emptied()
        asyncio.run_coroutine_threadsafe(inside, server.loop).result()
        waited(lambda: connection.getsockname() not in server.clients)


def test_a_thousand_idle_connections():
    allow_files(4096)  # both ends are this process's
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096:
        pytest.skip("this process may not have 4096 open files")
    limits = Limits(max_connections=1010, idle_timeout=HANG, header_timeout=HANG)
    with running(limits, scripted(TEXT)) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.raw()) for _ in range(1000)]
        for connection in idle[::100]:  # some have begun to ask
            connection.sendall(b"POST /v1/comp")
        for _ in range(3):
            is_well(server)
        more = [stack.enter_context(server.raw()) for _ in range(30)]
        refused = 0
        for connection in more[-15:]:
            status, body = answered(connection)
            refused += (status, body["error"]["code"]) == (503, "too_many_connections")
        assert refused == 15
        for connection in more:
            connection.close()
        is_well(server)
        # The idle ones are still served.
        idle[1].sendall(post(COMPLETION, {"prompt": "x"}))
        assert answered(idle[1])[0] == 200


def test_idle_connections_are_closed():
    with running(Limits(idle_timeout=0.2), scripted(TEXT)) as server:
        with server.raw() as new:
            assert closed(new)
        status = None
        while status is None:  # where the machine is busy, it may be closed before it has asked
            with server.raw() as used, contextlib.suppress(ConnectionError):
                used.sendall(post(COMPLETION, {"prompt": "x"}))
                status, _ = answered(used)
                assert closed(used)
        assert status == 200
        is_well(server, tries=6)
