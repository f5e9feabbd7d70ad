"""Calls of tools in what a model writes.

Two forms are read: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in the text (Hermes, Qwen), and
an answer that is one JSON object with "name" and "parameters" (Llama). What is neither, or calls a tool that the
request has not, stays text.
"""

import json
import uuid
from collections.abc import Set
from typing import Any

from pallas_attn.models.stopping import beginning

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class ToolCalls:
    """Text as it comes, of which calls are taken out.

    Attributes:
        calls: found so far, in the API's form.
    """

    def __init__(self, names: Set[str]):
        self._names = names
        self.calls: list[dict[str, Any]] = []
        self._text = ""
        self._started = False  # whether anything but spaces was there
        self._behind_call = False

    def shown(self, piece: str) -> str:
        """What of the text so far is no call, and cannot become one."""
        self._text += piece
        if not self._started:
            if not self._text.strip() or self._text.lstrip().startswith("{"):
                return ""  # perhaps an object, which ends with the answer
            self._started = True
        shown = ""
        while True:
            if self._behind_call:
                self._text = self._text.lstrip()
                self._behind_call = not self._text
            before, opening, behind = self._text.partition(_OPENING)
            if not opening:
                before = before[: len(before) - beginning(before, _OPENING)]
            inside, closing, rest = behind.partition(_CLOSING)
            if not closing:
                # Spaces around a call are none of the text.
                free = before.rstrip()
                self._text = self._text[len(free) :]
                return shown + free
            self._text, self._behind_call = rest, self._take(inside, "arguments")
            shown += before.rstrip() if self._behind_call else before + opening + inside + closing

    def rest(self) -> str:
        """At the end of the answer: what was held back and is no call after all."""
        text, self._text = self._text, ""
        whole = not self._started and self._take(text, "parameters")
        # Some models end with the object, and leave the closing out.
        _, opening, inside = text.partition(_OPENING)
        unclosed = bool(opening) and self._take(inside, "arguments")
        return "" if whole or unclosed else text

    def _take(self, spelled: str, arguments: str) -> bool:
        try:
            found = json.loads(spelled)
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict) or not isinstance(given := found.get(arguments, {}), dict):
            return False
        if not isinstance(name := found.get("name"), str) or name not in self._names:
            return False
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return True
