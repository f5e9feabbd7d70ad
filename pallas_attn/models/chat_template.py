"""Chat templates, rendered as transformers renders them: by its own renderer where it is installed, else by its rules.

Templates come from untrusted files. They run sandboxed, on plain data.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.chat_template"):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

type Templates = str | Mapping[str, str] | None
"""One template, or several by their names."""

_FUNCTION = "Tokenizer.apply_chat_template"
# Names for a message's reasoning; a template may read any of them, and most read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def template_for(templates: Templates, name: str | None, tools: Any) -> str:
    """The template itself, or the one named; by default "tool_use" if there are tools, otherwise "default"."""
    if isinstance(templates, Mapping):
        if name is not None:
            return templates.get(name, name)
        for usual in (("tool_use",) if tools is not None else ()) + ("default",):
            if usual in templates:
                return templates[usual]
        known = ", ".join(map(repr, sorted(templates)))
        fail(_FUNCTION, "chat_template", f"one of {known}", "none")
    if name is not None:
        return name
    if templates is None:
        fail(_FUNCTION, "chat_template", "a model with a chat template", "one without")
    return templates


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    **variables: Any,
) -> str:
    """The conversation as text. ValueError where the template refuses it."""
    by_transformers = None
    with contextlib.suppress(ImportError):
        from transformers.utils.chat_template_utils import render_jinja_template as by_transformers
    # Many templates render a content of None as "None", but cope with a missing one.
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options: dict[str, Any] = dict(
        variables, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
    )
    try:
        if by_transformers is not None:
            return by_transformers(conversations=[given], chat_template=template, **options)[0][0]
        return by_its_rules(template, given, **options)
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{_FUNCTION}: the template refused: {reason}") from error


def by_its_rules(
    template: str, messages: Sequence[Any], *, tools: Any = None, documents: Any = None, **variables: Any
) -> str:
    """By transformers' renderer, except for tools that are functions."""
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            expected = "dictionaries (JSON schemas); functions need transformers installed"
            fail(_FUNCTION, "tools", expected, type(tool).__name__, TypeError)
    chat = [_reasoning_by_all_names(message) for message in _plain(messages)]
    return _compiled(template).render(
        messages=chat, tools=_plain(tools), documents=_plain(documents), **_plain(variables)
    )


@functools.lru_cache(32)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; its body is rendered
    unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as a call block has.
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, which are Python internals."""

    def __init__(*args: Any, **kwargs: Any):
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def _plain(value: Any) -> Any:
    """Data of JSON's types; other objects become strings, since a template could call their methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _SCALARS:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"


def _reasoning_by_all_names(message: Any) -> Any:
    if not isinstance(message, dict):
        fail(_FUNCTION, "messages", "dictionaries", type(message).__name__, TypeError)
    said = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}
