"""Errors in the format of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("serve", user="pallas_attn.serve"):
    from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """Ends a request with a status and a sentence.

    Args:
        status: the HTTP status.
        message: what was expected and what was found.
        param: the field at fault.
        code: tells errors of one status apart.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JsonResponse(self.body, self.status, headers=self.headers)


def json_bytes(value: Any) -> bytes:
    # A lone surrogate, which a model may write into a call's arguments, becomes an escape.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
