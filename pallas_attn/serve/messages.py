"""Messages and tools of a chat, checked and converted for chat templates."""

import json
from typing import Any

from .errors import ApiError
from .fields import Fields, refuse

# The API renamed the system's role; templates know the old name.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def chat_messages(given: list[Any]) -> list[dict[str, Any]]:
    if not given:
        raise ApiError(400, "messages: expected at least one, got none", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Any, path: str) -> dict[str, Any]:
    fields = Fields.of(given, path)
    role = fields.need("role", str)
    if role not in _ROLES:
        refuse(fields.path("role"), " or ".join(map(repr, _ROLES)), role)
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = fields.take("tool_calls", list) if role == "assistant" else None
    content = fields.take("content", str, list)
    if content is None and not calls:
        raise ApiError(400, f"{path}.content: expected a string, got none", param=f"{path}.content")
    message["content"] = _text(content, f"{path}.content")
    if calls:
        message["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := fields.take(name, str)) is not None:
            message[name] = value
    # Further fields of this API's answers, which clients send back.
    fields.neutral("refusal", "")
    fields.neutral("annotations", [])
    fields.finish()
    return message


def _text(content: Any, path: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        fields = Fields.of(part, where)
        kind = fields.need("type", str)
        if kind != "text":
            refuse(f"{where}.type", '"text" (no other is served)', kind, code="unsupported_value")
        texts.append(fields.need("text", str))
        fields.finish()
    return "".join(texts)


def _call(given: Any, path: str) -> dict[str, Any]:
    fields = Fields.of(given, path)
    identity = fields.take("id", str)
    about = _function(fields)
    name, spelled = about.need("name", str), about.take("arguments", str, default="{}")
    about.finish()
    try:
        arguments = json.loads(spelled or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # templates serialise it again
        refuse(f"{path}.function.arguments", "an object in JSON", spelled)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def _function(fields: Fields) -> Fields:
    """What a call or a tool says of its function, the last of its own fields."""
    if (kind := fields.take("type", str, default="function")) != "function":
        refuse(fields.path("type"), '"function"', kind)
    about = Fields.of(fields.need("function", dict), fields.path("function"))
    fields.finish()
    return about


def chat_tools(given: list[Any]) -> list[dict[str, Any]]:
    """Unchanged, since templates show them to the model."""
    for index, tool in enumerate(given):
        path = f"tools[{index}]"
        fields = Fields.of(tool, path)
        about = _function(fields)
        about.need("name", str)
        about.take("description", str)
        about.take("parameters", dict)
        about.neutral("strict", False)
        about.finish()
    return given


def tool_names(tools: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)
