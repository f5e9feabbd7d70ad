"""A server for tests: a tiny random model that writes any bytes, behind a real socket of this machine."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import tokenizers
from models_support import tiny_llama
from tokenizers import decoders, models, pre_tokenizers

from pallas_attn.models import Engine, LlamaConfig, Request, Tokenizer
from pallas_attn.models.stats import EngineStats
from pallas_attn.serve import App, Limits, Served, Server, bound

END, START = 0, 1
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ greeting | default('') }}"
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
NUM_ROWS = 8
HANG = 3600.0
"""Seconds, where something waits for what comes sooner or later: a machine that is busy may take its time."""


@functools.cache
def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A token for each byte, so that a character may be four tokens, and two words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: index for index, token in enumerate(["<|end|>", "<|start|>", *alphabet, "ab", "abc"])
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    return Tokenizer(
        tokenizer,
        bos_token_id=None,
        eos_token_id=END,
        stop_token_ids=[END],
        add_bos=False,
        chat_template=template,
    )


CONFIG = LlamaConfig(
    vocab_size=260,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=512,
)


@functools.cache
def model():
    return tiny_llama(config=CONFIG)


@functools.cache
def engine() -> Engine:
    """Compiled once for all tests of a process; one server has it at a time."""
    return Engine(
        model(),
        max_len=256,
        num_rows=NUM_ROWS,
        num_pages=24,  # far fewer than all rows fill: some are sent back
        page_size=8,
        step_tokens=64,
        burst=4,
        stop_token_ids=[END],
        tokenizer=byte_tokenizer(),
    )


class Scripted(Engine):
    """Says what it is told to, whatever it is asked, `burst` tokens a step, and steps last as long as they are told.

    Attributes:
        submitted: requests so far.
        held: while it is set, steps give nothing; it is after `holds_after` steps.
        fails: so many steps are to fail.
        refuses: whether submitting is to fail.
    """

    max_len = 256  # type: ignore[assignment]
    compile_seconds = 0.0  # type: ignore[assignment]

    def __init__(
        self,
        says: str = "",
        *,
        burst: int = 3,
        seconds: float = 0.0,
        ends: bool = True,
        holds_after: int | None = None,
    ):
        self.says = [*byte_tokenizer().encode(says), *([END] if ends else [])]
        self.burst, self.seconds, self.holds_after = burst, seconds, holds_after
        self.submitted: list[Request] = []
        self.held, self.fails, self.refuses = threading.Event(), 0, False
        self.steps = 0

    @property
    def busy(self) -> bool:
        return not all(request.done for request in self.submitted)

    def submit(self, prompt, *, max_new_tokens=64, sampling=None) -> Request:
        if self.refuses:
            raise RuntimeError("no host")
        if 7 in prompt:
            raise ValueError("Engine.submit: argument 'prompt': expected no 7, got 7")
        request = Request(len(self.submitted), tuple(prompt), max_new_tokens, frozenset([END]))
        self.submitted.append(request)
        return request

    def cancel(self, request: Request) -> None:
        if not request.done:
            request.end("cancelled")

    def step(self) -> dict[Request, list[int]]:
        time.sleep(self.seconds)
        self.steps += 1
        if self.steps == self.holds_after:
            self.held.set()
        if self.fails:
            self.fails -= 1
            if not self.fails:
                for request in self.submitted:
                    request.end("error", "RuntimeError: no device")
            raise RuntimeError("no device")
        if self.held.is_set():
            time.sleep(0.001)
            return {}
        new = {}
        for request in [request for request in self.submitted if not request.done][:NUM_ROWS]:
            start, room = len(request.answer), request.max_new_tokens - len(request.answer)
            new[request] = self.says[start : start + min(self.burst, room)]
            request.grow(new[request])
            if request.answer[-1:] == [END]:
                request.end("stop")
            elif len(request.answer) in (request.max_new_tokens, len(self.says)):
                request.end("length")
        return new

    def stats(self) -> EngineStats:
        running = sum(not request.done for request in self.submitted)
        return EngineStats(0, running, 9, 8, 1, 3, 2, 1, {"stop": 4}, 0, self.steps, 0.5)


def scripted(*args: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Served:
    return Served("tiny", Scripted(*args, **options), tokenizer or byte_tokenizer())


def served(tokenizer: Tokenizer | None = None, **options: Any) -> Served:
    return Served("tiny", engine(), tokenizer or byte_tokenizer(), **options)


@dataclasses.dataclass
class Running:
    url: str
    server: Server
    app: App

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.server._loop

    @property
    def clients(self) -> set[tuple[str, int]]:
        """Of connections that are open."""
        return {each.client for each in list(self.server._uvicorn.server_state.connections)}

    def raw(self, timeout: float = HANG) -> socket.socket:
        return socket.create_connection(self.address, timeout)


@contextlib.contextmanager
def running(
    limits: Limits | None = None,
    served_: Served | None = None,
    api_key: str | None = None,
    send_buffer: int | None = None,
) -> Iterator[Running]:
    limits, listener = limits or Limits(), bound("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    app = App(served_ or served(), limits, num_rows=NUM_ROWS, api_key=api_key)
    server = Server(app, limits, listener)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(ready.set)))
    thread.start()
    ready.wait()
    try:
        yield Running(server.url, server, app)
    finally:
        server.stop()
        thread.join()


def post(path: str, body: Any, **headers: str) -> bytes:
    """A request as bytes; a body that is not bytes is JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"host": "tiny", "content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in (usual | headers).items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def waited(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)
