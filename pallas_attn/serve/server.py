"""Runs the application on a socket by uvicorn: signals, and a shutdown that loses no accepted request."""

import asyncio
import contextlib
import functools
import ipaddress
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

from pallas_attn import _interrupt
from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    import uvicorn

from .app import App
from .connection import Connection
from .errors import ApiError
from .limits import Limits

_BACKLOG = 2048
# Open files besides connections: libraries, devices, pipes.
_OTHER_FILES = 256
# Seconds for the last bytes to reach clients, once everything is answered.
_FLUSHING = 5


class Server:
    """Serves an application until it is told to stop.

    Args:
        app: the application.
        limits: of requests and connections.
        listener: a bound socket, of `bound`.
        access_log: whether each request is logged.

    Attributes:
        url: the server's address.
    """

    def __init__(self, app: App, limits: Limits, listener: socket.socket, *, access_log: bool = False):
        self._app, self._limits, self._listener = app, limits, listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        allow_files(limits.max_connections + _OTHER_FILES)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, limits=limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=access_log,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=limits.idle_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=_FLUSHING,
            )
        )

    def run(self, ready: Callable[[], None], stopping: Callable[[int], None]) -> None:
        """Until SIGTERM or Ctrl-C, after which accepted requests are finished; a second one ends the process at once.
        In the main thread.

        Args:
            ready: called once it listens.
            stopping: called with the number of unfinished answers.
        """

        heard = False

        def hear(number: int, frame: object) -> None:
            nonlocal heard
            if heard:
                os._exit(128 + number)
            heard = True
            self.stop()

        before = signal.signal(signal.SIGTERM, hear)
        try:
            with _interrupt.raised(hear):
                asyncio.run(self.serve(ready, stopping))
        finally:
            signal.signal(signal.SIGTERM, before)

    async def serve(
        self, ready: Callable[[], None], stopping: Callable[[int], None] = lambda left: None
    ) -> None:
        """The same in a running event loop, until `stop`."""
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        stopped = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        self._app.gate.close()
        stopping(self._app.gate.inside)
        try:
            async with asyncio.timeout(self._limits.stop_timeout):
                await self._app.gate.emptied()
        except TimeoutError:
            self._app.worker.end_all(ApiError(503, "the server has stopped", code="stopped"))
        self._uvicorn.should_exit = True
        await serving

    def stop(self) -> None:
        """From any thread or signal handler: takes no new requests and ends when accepted ones are finished."""
        if self._loop is None:
            self._stopping.set()
        else:
            self._loop.call_soon_threadsafe(self._stopping.set)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`Server.run` does."""
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound but not yet listening."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as unless_bound:
            # With the protocol left unspecified, asyncio does not set TCP_NODELAY, and an answer's body would arrive 40
            # ms after its head.
            listener = unless_bound.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            unless_bound.pop_all()
            return listener
    except (OSError, OverflowError) as error:
        fail("serve", "host and port", "an address to listen on", f"{host}:{port} ({error})", OSError)


def is_local(listener: socket.socket) -> bool:
    """Whether it is reachable from this machine only."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def allow_files(count: int) -> None:
    """Raises the limit on open files, which is often lower than what one process can have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
