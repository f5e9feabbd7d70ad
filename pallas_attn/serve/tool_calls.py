"""Tool calls in a model's text.

Two forms are read: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in the text (Hermes, Qwen), and
an answer that is one JSON object with "name" and "parameters" (Llama). Anything else, and calls of tools that the
request does not have, stays text.
"""

import json
import uuid
from collections.abc import Set
from typing import Any

from pallas_attn.models.stopping import beginning

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class ToolCalls:
    """Removes calls from text as it arrives.

    Attributes:
        calls: those found so far, in the API's format.
    """

    def __init__(self, names: Set[str]):
        self._names = names
        self.calls: list[dict[str, Any]] = []
        self._text = ""
        self._started = False  # whether anything but spaces has appeared
        self._behind_call = False

    def shown(self, piece: str) -> str:
        """The part of the text so far that is not and cannot become a call."""
        self._text += piece
        if not self._started:
            if not self._text.strip() or self._text.lstrip().startswith("{"):
                return ""  # possibly an object, complete only at the end of the answer
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
                # Spaces around a call do not belong to the text.
                free = before.rstrip()
                self._text = self._text[len(free) :]
                return shown + free
            self._text, self._behind_call = rest, self._take(inside, "arguments")
            shown += before.rstrip() if self._behind_call else before + opening + inside + closing

    def rest(self) -> str:
        """At the end of the answer: text that was held back and is not a call."""
        text, self._text = self._text, ""
        whole = not self._started and self._take(text, "parameters")
        # Some models omit the closing tag.
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
