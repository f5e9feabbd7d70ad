"""Reads a request's JSON object without ignoring anything that would change the answer."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import ApiError

_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
_LONGEST_SHOWN = 60


def refuse(param: str, expected: str, got: Any, code: str | None = None) -> NoReturn:
    raise ApiError(400, f"{param}: expected {expected}, got {shown(got)}", param=param, code=code)


def shown(value: Any) -> str:
    """A value in JSON's spelling, for messages."""
    try:
        text = json.dumps(value)
    except ValueError:  # an int of more digits than Python prints
        text = "a long number"
    return (
        text
        if len(text) <= _LONGEST_SHOWN
        else f"{_NAMES.get(type(value), 'a value')} of {len(text)} characters"
    )


def parsed(body: bytes) -> dict[str, Any]:
    """Parses a request's body as a JSON object."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "body: expected JSON of reasonable depth, got deeper nesting") from None
    except ValueError as error:  # invalid JSON, invalid UTF-8, or ints with thousands of digits
        reason = " ".join(str(error).split())
        raise ApiError(400, f"body: expected JSON, got something else: {reason}") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"body: expected a JSON object, got {_NAMES[type(found)]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is none of JSON's numbers")


class Fields:
    """The fields of an object, each taken once by name; null counts as absent.

    Args:
        given: the object.
        path: prefix of field names in messages: "messages[0].".
    """

    def __init__(self, given: Mapping[str, Any], path: str = ""):
        self._left = {name: value for name, value in given.items() if value is not None}
        self._path = path

    @classmethod
    def of(cls, given: Any, path: str) -> "Fields":
        """Those of what has to be an object, at `path`."""
        if not isinstance(given, dict):
            refuse(path, "an object", given)
        return cls(given, f"{path}.")

    def path(self, name: str) -> str:
        return f"{self._path}{name}"

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """A field of one of the types; an int counts as a float, a bool as neither."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        wanted = {*kinds, int} if float in kinds else {*kinds}
        if type(value) not in wanted:
            refuse(self.path(name), " or ".join(_NAMES[kind] for kind in kinds), value)
        if float in kinds:
            try:
                return float(value)
            except OverflowError:
                refuse(self.path(name), "a number of reasonable size", value)
        return value

    def need(self, name: str, *kinds: type) -> Any:
        if name not in self._left:
            expected = " or ".join(_NAMES[kind] for kind in kinds)
            raise ApiError(400, f"{self.path(name)}: expected {expected}, got none", param=self.path(name))
        return self.take(name, *kinds)

    def neutral(self, name: str, *values: Any) -> None:
        """An unsupported field, accepted with `values` that ask for nothing; without `values`, with any."""
        if name not in self._left:
            return
        value = self._left.pop(name)
        if values and not any(type(value) is type(each) and value == each for each in values):
            expected = " or ".join(json.dumps(each) for each in values)
            refuse(self.path(name), f"{expected} (no other is served)", value, code="unsupported_value")

    def finish(self) -> None:
        """Refuses fields that were not taken."""
        for name, value in self._left.items():
            where = self.path(name)
            message = f"{where}: expected no field that is not served, got {shown(value)}"
            raise ApiError(400, message, param=where, code="unsupported_parameter")
