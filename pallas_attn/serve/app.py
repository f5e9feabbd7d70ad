"""The server's paths, and authentication."""

import contextlib
import dataclasses
import hmac
import time
from collections.abc import AsyncIterator
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Message, Receive, Scope, Send

from .answers import ChatCompletion, Completion
from .asked import Served, chat_asked, completion_asked
from .endpoint import Endpoint
from .errors import ApiError, JsonResponse
from .gate import Gate
from .limits import Limits
from .metrics import Metrics
from .worker import Worker

_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
_WRONG_KEY = ApiError(
    401,
    "expected the server's API key as `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


class App:
    """An ASGI application.

    Args:
        served: the model. The application owns its engine from start to end.
        limits: of requests and connections.
        num_rows: answers that the engine computes at once.
        api_key: required by requests to /v1; None: no key is needed.

    Attributes:
        gate: counts answers in progress; the server closes it.
        worker: the engine's thread.
    """

    def __init__(self, served: Served, limits: Limits, *, num_rows: int, api_key: str | None = None):
        self._served, self._key = served, api_key
        most = num_rows + limits.max_waiting
        # More than the limit can ever take: no use in trying again.
        limits = dataclasses.replace(limits, max_choices=min(limits.max_choices, most))
        self.gate, self.worker = Gate(most), Worker(served.engine)
        self._metrics = Metrics(self.worker)
        self.worker.on_end = self._metrics.ended
        self._created = int(time.time())
        inside = served, limits, self.gate, self.worker
        posts = {
            "/v1/completions": Endpoint(completion_asked, Completion, *inside),
            "/v1/chat/completions": Endpoint(chat_asked, ChatCompletion, *inside),
        }
        gets = {
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._model,
            "/health": self._health,
            "/metrics": self._figures,
        }
        self._app = Starlette(
            routes=[
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
                *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            ],
            exception_handlers={ApiError: _refused, HTTPException: _refused_by_routing, Exception: _broken},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        await run_in_threadpool(int)  # its imports would take longer than a request
        yield
        await self.worker.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 499  # from a client that has disconnected; nobody reads it

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            app = self._app if self._may(scope) else _WRONG_KEY.response()
            await app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self._metrics.answered(path, status)

    def _may(self, scope: Scope) -> bool:
        if self._key is None or not scope["path"].startswith("/v1/"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # In constant time.
        return hmac.compare_digest(given, b"Bearer " + self._key.encode())

    async def _models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["model"]) != self._served.name:
            message = f"model: expected {self._served.name!r}, got {name!r:.80}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JsonResponse(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pallas-attn",
            "max_model_len": self._served.engine.max_len,
        }

    async def _health(self, request: Request) -> Response:
        status = "stopping" if self.gate.closed else "failing" if self.worker.failing else "ok"
        return JsonResponse({"status": status}, 200 if status == "ok" else 503)

    async def _figures(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _refused_by_routing(request: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:80]}"
    known = ", ".join(sorted(_PATHS))
    expected = (
        f"one of {known}" if error.status_code == 404 else (error.headers or {}).get("Allow", "another")
    )
    message = f"path: expected {expected}, got {path}"
    return ApiError(error.status_code, message, headers=error.headers).response()


def _broken(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed; its log says how", code="internal_error").response()
