"""uvicorn's connection with further time limits, so that idle clients cannot hold it open."""

import asyncio
import sys
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, json_bytes
from .limits import Limits

# Seconds for a client whose body was refused to read the answer before the connection is closed.
_LINGER = 2.0


class Connection(H11Protocol):
    """Closed when its next request, its headers, or the reading of its answer take too long; refused when there are too
    many of them.

    Args:
        limits: of the server.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any):
        super().__init__(*args, **options)
        self._limits = limits
        self._awaited = ""  # what the client must do next
        self._clock: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > (most := self._limits.max_connections):
            message, retry = f"{most} connections are open, and no more fit: try again", {"retry-after": "1"}
            self._refuse(ApiError(503, message, code="too_many_connections", headers=retry))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Restarts the clock only when something else is awaited: sending byte by byte gains no time."""
        state = self.conn.their_state
        if self.transport.is_closing():
            awaited = "flush"
        elif state is h11.IDLE:
            awaited = "headers" if self.conn.trailing_data[0] else "request"
        elif state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            # The answer was sent before the whole body arrived; uvicorn discards the rest.
            awaited = "rest"
        else:
            awaited = ""
        if awaited != self._awaited:
            self._awaited = awaited
            if self._clock is not None:
                self._clock.cancel()
            limits, close = self._limits, self.transport.close
            clocks = {
                "headers": (limits.header_timeout, self._too_slow),
                "request": (limits.idle_timeout, close),
                "rest": (_LINGER, close),
                # Writes that fit in the buffer do not wait.
                "flush": (limits.write_timeout, self.transport.abort),
            }
            if awaited:
                self._clock = self.loop.call_later(*clocks[awaited])

    def _too_slow(self) -> None:
        message = f"the headers were not there within {self._limits.header_timeout:g} s"
        self._refuse(ApiError(408, message, code="header_timeout"))
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for clock in (self._clock, self._writing):
            if clock is not None:
                clock.cancel()

    def send_400_response(self, msg: str) -> None:
        """Something that is not HTTP."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        self._refuse(ApiError(status, f"{msg.rstrip('.')}: {sys.exception()}", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answers without the application."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json_bytes(error.body)
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            head = [(name.encode(), value.encode()) for name, value in (headers | error.headers).items()]
            reason = b"Refused"
            for event in (
                h11.Response(status_code=error.status, headers=head, reason=reason),
                h11.Data(data=body),
            ):
                self.transport.write(self.conn.send(event))  # type: ignore[arg-type]
        self.transport.close()
