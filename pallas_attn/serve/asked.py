"""Parses requests: checked fields, and prompts as tokens.

Supported fields are read; unsupported ones are accepted with values that ask for nothing; any other is refused by name.
"""

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_attn.models import Engine, Sampling, Tokenizer

from .errors import ApiError
from .fields import Fields, parsed, refuse
from .limits import Limits
from .messages import chat_messages, chat_tools, tool_names

# Searching for stop texts takes time from everybody's steps.
MOST_STOPS, LONGEST_STOP = 16, 256
_USUAL_COMPLETION = 16  # tokens, the API's default
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Variables of a chat template that a request may not set.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
_ARGUMENT = re.compile(r"^[\w.]+: argument '(?:sampling\.)?(\w+)': (.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model under the name that requests call it by.

    sampling: the model's defaults; a request's fields override them.
    template: variables of the chat template; a request's `chat_template_kwargs` override them.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def usual(self) -> Sampling:
        """The default of a request: by the API, texts are sampled at temperature 1 unless stated otherwise."""
        return dataclasses.replace(self.sampling, temperature=1.0) if self.sampling.greedy else self.sampling


@dataclasses.dataclass(frozen=True)
class Asked:
    """prompts: token ids. max_new_tokens: for each prompt's answers. tools: names of tools that may be called."""

    prompts: list[list[int]]
    max_new_tokens: list[int]
    sampling: Sampling
    stream: bool
    include_usage: bool
    tools: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.sampling.n

    def each(self) -> Iterator[tuple[list[int], int, Sampling]]:
        """(prompt, most new tokens, sampling) of every answer, with seeds of their own, as `generate` deals them."""
        for place in range(self.count):
            prompt = place // self.sampling.n
            yield self.prompts[prompt], self.max_new_tokens[prompt], self.sampling.shifted(place)


def completion_asked(body: bytes, served: Served, limits: Limits) -> Asked:
    """Of /v1/completions."""
    fields = Fields(parsed(body))
    _check_model(fields, served)
    given = fields.need("prompt", str, list)
    sampling = _sampling(fields, served, fields.take("logprobs", int))
    wanted = fields.take("max_tokens", int, default=_USUAL_COMPLETION)
    stream, include_usage = _streaming(fields)
    fields.neutral("echo", False)
    fields.neutral("best_of", 1)
    fields.neutral("suffix", "")
    _finish(fields)
    texts = given if isinstance(given, list) and not all(type(each) is int for each in given) else [given]
    _check_choices(len(texts), sampling.n, limits)
    prompts = [_prompt(text, served.tokenizer) for text in texts]
    rooms = [_room(prompt, wanted, "max_tokens", "prompt", served, limits) for prompt in prompts]
    return Asked(prompts, rooms, sampling, stream, include_usage)


def chat_asked(body: bytes, served: Served, limits: Limits) -> Asked:
    """Of /v1/chat/completions."""
    fields = Fields(parsed(body))
    _check_model(fields, served)
    messages = chat_messages(fields.need("messages", list))
    tools = chat_tools(fields.take("tools", list, default=[]))
    if (choice := fields.take("tool_choice", str, dict, default="auto")) not in ("auto", "none"):
        refuse("tool_choice", '"auto" or "none" (no other is served)', choice, code="unsupported_value")
    if choice == "none":
        tools = []
    variables = fields.take("chat_template_kwargs", dict, default={})
    if taken := _OURS & variables.keys():
        refuse("chat_template_kwargs", f"no variable named {sorted(taken)[0]}", variables)
    top, logprobs = fields.take("top_logprobs", int), fields.take("logprobs", bool, default=False)
    if top is not None and not logprobs:
        refuse("top_logprobs", "none without logprobs", top)
    sampling = _sampling(fields, served, (top or 0) if logprobs else None)
    limit = "max_tokens" if fields.has("max_tokens") else "max_completion_tokens"
    wanted = fields.take(limit, int)
    stream, include_usage = _streaming(fields)
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("modalities", ["text"])
    fields.neutral("parallel_tool_calls", True)
    fields.neutral("functions", [])
    fields.neutral("function_call", "none")
    _finish(fields)
    _check_choices(1, sampling.n, limits)
    prompt = _chat(messages, tools, {**served.template, **variables}, served.tokenizer)
    room = _room(prompt, wanted, limit, "messages", served, limits)
    return Asked([prompt], [room], sampling, stream, include_usage, tool_names(tools))


def refusal(error: Exception, param: str | None = None) -> ApiError:
    """An error about this library's argument, reworded for the request's field."""
    message = str(error)
    if found := _ARGUMENT.match(message):
        param, message = param or found[1], found[2]
        message = f"{param}: {message}"
    return ApiError(400, message, param=param)


def _check_model(fields: Fields, served: Served) -> None:
    if (name := fields.take("model", str, default=served.name)) != served.name:
        message = f"model: expected {served.name!r}, got {name!r:.80}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _sampling(fields: Fields, served: Served, logprobs: int | None) -> Sampling:
    given = {name: value for name in _NUMBERS if (value := fields.take(name, float)) is not None}
    given |= {name: value for name in ("n", "seed", "top_k") if (value := fields.take(name, int)) is not None}
    # Several answers to a prompt differ, unless a seed or greedy sampling asks otherwise.
    given["seed"] = given.get("seed", secrets.randbits(32)) % 2**32
    if given.get("top_k") in (0, -1):  # other servers' value for "all"
        given["top_k"] = None
    stops = fields.take("stop", str, list, default=[])
    given["stop"] = stops = [stops] if isinstance(stops, str) else stops
    given["stop_token_ids"] = fields.take("stop_token_ids", list, default=[])
    if len(stops) > MOST_STOPS or any(isinstance(stop, str) and len(stop) > LONGEST_STOP for stop in stops):
        refuse("stop", f"at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters", stops)
    try:
        return dataclasses.replace(served.usual, **given, logprobs=logprobs)
    except (ValueError, TypeError) as error:
        raise refusal(error) from None


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """(whether to stream, whether to include token counts)"""
    stream, given = fields.take("stream", bool, default=False), fields.take("stream_options", dict)
    if given is None:
        return stream, False
    if not stream:
        refuse("stream_options", "none without stream", given)
    options = Fields(given, "stream_options.")
    include_usage = options.take("include_usage", bool, default=False)
    options.neutral("include_obfuscation", False)
    options.finish()
    return stream, include_usage


def _finish(fields: Fields) -> None:
    """Accepts fields that do not change the answer, then refuses every other."""
    fields.neutral("logit_bias", {})
    fields.neutral("store", False)
    fields.neutral("service_tier", "auto", "default")
    # For the caller's own records.
    for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
        fields.neutral(name)
    fields.finish()


def _check_choices(prompts: int, n: int, limits: Limits) -> None:
    if prompts * n > limits.max_choices:
        refuse("n", f"prompts times n of at most {limits.max_choices}", prompts * n)


def _prompt(given: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(given, str):
        if not isinstance(given, list) or not all(type(token) is int for token in given):
            refuse("prompt", "a string, token ids, or an array of either", given)
        tokens = given
    else:
        try:
            tokens = tokenizer.encode(given)
        except ValueError as error:
            raise refusal(error, "prompt") from None
    if not tokens:
        raise ApiError(400, "prompt: expected at least one token, got none", param="prompt")
    return tokens


def _chat(
    messages: list[dict[str, Any]], tools: list[Any], variables: Mapping[str, Any], tokenizer: Tokenizer
) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, **variables)
        if tools and text == tokenizer.apply_chat_template(messages, **variables):
            raise ApiError(400, "tools: expected none, since the model's chat template has no place for them, got some",
                           param="tools", code="unsupported_value")  # fmt: skip
        return tokenizer.encode(text, add_special_tokens=False)
    except (ValueError, TypeError) as error:
        raise refusal(error, "messages") from None


def _room(
    prompt: list[int], wanted: int | None, limit: str, param: str, served: Served, limits: Limits
) -> int:
    """The most tokens of the answer to a prompt."""
    if wanted is not None and wanted < 1:
        refuse(limit, "at least 1", wanted)
    if wanted is not None and limits.max_tokens is not None and wanted > limits.max_tokens:
        refuse(limit, f"at most {limits.max_tokens}", wanted)
    left = served.engine.max_len - len(prompt)
    if left < (wanted or 1):
        expected = f"with {limit} together at most {served.engine.max_len} tokens"
        message = f"{param}: expected {expected}, got {len(prompt)} + {wanted or 1}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return wanted or min(left, limits.max_tokens or left)
