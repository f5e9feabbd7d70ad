"""A request on its way to the engine, and its answer on the way back."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

from .answers import Answer, Choice
from .asked import Asked, Served
from .errors import ApiError, JsonResponse, json_bytes
from .gate import Gate
from .limits import Limits
from .text import AnswerText
from .worker import Job, Worker


class Endpoint:
    """An ASGI application that answers.

    Args:
        asked: reads what a request's body asks for.
        answer: the kind of answer.
        served, limits, gate, worker: those of the server.
    """

    def __init__(
        self,
        asked: Callable[[bytes, Served, Limits], Asked],
        answer: type[Answer],
        served: Served,
        limits: Limits,
        gate: Gate,
        worker: Worker,
    ):
        self._asked, self._kind = asked, answer
        self._served, self._limits, self._gate, self._worker = served, limits, gate, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._gate.entered() as take:
            try:
                body = await read_body(Request(scope, receive), self._limits)
            except ClientDisconnect:
                return
            # In a thread: templates and tokenizers take time, and others should not wait.
            asked = await run_in_threadpool(self._asked, body, self._served, self._limits)
            take(asked.count)
            changed = asyncio.Event()
            jobs = [Job(*each, asked.stream, changed) for each in asked.each()]
            choices = [
                Choice(index, job, AnswerText(self._served.tokenizer, job.sampling), asked.tools)
                for index, job in enumerate(jobs)
            ]
            answer = self._kind(self._served.name, asked, choices)
            work = _streamed if asked.stream else _whole
            with self._worker.submitted(jobs, self._limits.request_timeout):
                await unless_gone(receive, work(answer, changed, scope, receive, send))


async def _whole(answer: Answer, changed: asyncio.Event, scope: Scope, receive: Receive, send: Send) -> None:
    while not all(choice.job.done for choice in answer.choices):
        await changed.wait()
        changed.clear()
        _check(answer)
    _check(answer)
    await JsonResponse(answer.whole())(scope, receive, send)


async def _streamed(
    answer: Answer, changed: asyncio.Event, scope: Scope, receive: Receive, send: Send
) -> None:
    """Streams events. An error before the first one sets the status; later ones are sent as an event."""
    await changed.wait()
    _check(answer)
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
    head = Response(headers={**headers, "x-accel-buffering": "no"}).raw_headers
    head = [(name, value) for name, value in head if name != b"content-length"]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    events = answer.opening()
    try:
        while left := [choice for choice in answer.choices if not choice.ended]:
            await changed.wait()
            changed.clear()
            _check(answer)
            for choice in left:
                events += answer.news(choice)
            if events:
                await _send_events(send, events)
            events = []
        await _send_events(send, answer.closing(), b"data: [DONE]\n\n")
    except ApiError as error:
        await _send_events(send, [*events, error.body])
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(send: Send, events: list[dict[str, Any]], end: bytes = b"") -> None:
    body = b"".join([b"data: " + json_bytes(event) + b"\n\n" for event in events]) + end
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _check(answer: Answer) -> None:
    """Raises the error that keeps the answer from being finished."""
    for choice in answer.choices:
        if choice.job.error is not None:
            raise choice.job.error


async def read_body(request: Request, limits: Limits) -> bytes:
    """Reads a body with a content type; one that is too long is refused before it is read."""
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "application/json":
        # It also keeps web pages of other sites from calling a server on the reader's machine.
        raise ApiError(415, f"content-type: expected application/json, got {kind:.80}")
    too_long = ApiError(
        413, f"body: expected at most {limits.max_body} bytes, got more", code="body_too_long"
    )
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > limits.max_body:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body:
                    raise too_long
    except TimeoutError:
        message = f"the body was not there within {limits.body_timeout:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, unless the client disconnects first."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        for each in (doing, gone):
            each.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
