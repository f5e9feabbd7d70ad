"""Limits of sizes and times, each an option of `pallas-attn serve`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Attributes:
    max_waiting: answers that wait for a row of the engine; with more than that a request is refused (503).
    max_choices: answers that one request asks for: its prompts times `n`.
    max_tokens: new tokens of an answer; None: as many as fit.
    max_body: bytes of a request's body.
    max_connections: open at once, idle ones too.
    request_timeout: seconds from a request's acceptance to the end of its answer.
    header_timeout: seconds from a request's first byte to the end of its headers.
    body_timeout: seconds for its body.
    write_timeout: seconds for which a client may read nothing of an answer that waits for it.
    idle_timeout: seconds for which a connection may stay open without a request.
    stop_timeout: seconds in which accepted requests are finished after SIGTERM or Ctrl-C.
    """

    max_waiting: int = 256
    max_choices: int = 16
    max_tokens: int | None = None
    max_body: int = 4 * 2**20
    max_connections: int = 4096
    request_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    idle_timeout: float = 75.0
    stop_timeout: float = 60.0
