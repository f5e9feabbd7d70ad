"""`pallas-attn chat`: a conversation in the terminal, answered token by token.

Every turn is a request with the whole conversation as prompt; the prefix cache has all but the new tokens.
"""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from pallas_attn import _interrupt
from pallas_attn._call.checks import fail
from pallas_attn._interrupt import INTERRUPTED
from pallas_attn.models import Engine, LoadedModel, Sampling
from pallas_attn.models.detokenizer import Detokenizer
from pallas_attn.models.stopping import Held

from .generate import sampling_of
from .model import ModelOptions, engine_of, load
from .wrap import Wrapped

# Tokens a step: a terminal wants them one by one, a GPU several at a time.
_BURST = 4
_HELP = (
    "Ctrl-C stops an answer; between answers it leaves, as Ctrl-D does. /new starts over, /help says this."
)
_COMMAND = re.compile(r"/[a-z]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions):
    """The command's options, by their names on the command line."""

    system: str | None
    max_new_tokens: int
    max_len: int
    sampling: dict[str, Any]
    prefill_chunk: int


def run_chat(options: ChatOptions) -> int:
    """Runs the command: answers to stdout, all else to stderr.

    Returns:
        0 at the end of the input, 130 after Ctrl-C.

    Raises:
        ValueError, OSError, ImportError: what the user has to change, in one line.
    """
    out, err = (
        Console(highlight=False, markup=False, soft_wrap=not file.isatty(), stderr=file is sys.stderr)
        for file in (sys.stdout, sys.stderr)
    )
    sampling_of(Sampling(), options.sampling)  # range errors are reported before the model is read
    loaded = load(err, options)
    # A model without a chat template is refused now, not after the first question.
    loaded.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], **options.template)
    sizes = dict(max_len=options.max_len, num_rows=1, step_tokens=options.prefill_chunk, burst=_BURST)
    engine = engine_of(loaded, options, **sizes)
    sampling = sampling_of(loaded.sampling, options.sampling)
    with err.status("compiling"):
        engine.compile(sampling)
    err.print(f"{loaded.name}, {options.dtype}. {_HELP}")
    return Chat(loaded, engine, options, sampling, out, err).run(input)


class Chat:
    """The conversation so far, and the loop around it."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        options: ChatOptions,
        sampling: Sampling,
        out: Console,
        err: Console,
    ):
        self._tokenizer, self._engine, self._options = loaded.tokenizer, engine, options
        self._sampling, self._out, self._err = sampling, out, err
        self._most = min(options.max_len, loaded.model.config.context_length)
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[str], str]) -> int:
        """Answers lines of `read` until there are none."""
        self._start_over()
        while True:
            try:
                with _interrupt.raised():
                    line = read("> " if self._err.is_terminal else "").strip()
            except EOFError:
                return 0
            except UnicodeDecodeError as error:
                fail("chat", "standard input", "UTF-8 text", f"byte {error.object[error.start]:#x}")
            except KeyboardInterrupt:
                self._err.print()
                return INTERRUPTED
            if line == "/new":
                self._start_over()
            elif line == "/help":
                self._err.print(_HELP)
            elif _COMMAND.fullmatch(line):
                self._err.print(f"There is no {line}. {_HELP}")
            elif line:
                self._answer(line)

    def _start_over(self) -> None:
        system = self._options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        prompt = self._fitting_prompt()
        room = min(self._options.max_new_tokens, self._most - len(prompt))
        if room < 1:
            self._err.print(f"too long: {len(prompt)} tokens, of at most {self._most - 1} (--max-len)")
            self.messages.pop()
            return
        request = self._engine.submit(prompt, max_new_tokens=room, sampling=self._sampling)
        started, text = time.perf_counter(), ""
        wrapped = Wrapped(lambda: self._out.width)

        def show(piece: str) -> None:
            nonlocal text
            text += piece
            self._print(wrapped.shown(piece) if self._out.is_terminal else piece)

        with _interrupt.heard() as stopped:
            tokens = self._engine.stream(request, stopped.is_set)
            held = Held(self._sampling.stop)
            for piece in pieces(self._tokenizer.decode, tokens):
                show(held.shown(piece))
            show(held.rest())
            self._print(wrapped.rest())
        seconds = time.perf_counter() - started
        self._out.print()
        self.messages.append({"role": "assistant", "content": text})
        count, ended = len(request.answer), ", stopped" if stopped.is_set() else ""
        self._err.print(
            f"[{count} tokens, {count / seconds:.1f} a second; of {len(prompt)} before them "
            f"{request.cached_tokens} were in the cache{ended}]",
            style="dim",
        )

    def _print(self, text: str) -> None:
        """Prints part of an answer, wrapped."""
        self._out.print(text, end="", soft_wrap=True)

    def _fitting_prompt(self) -> list[int]:
        """The conversation's tokens, without its oldest turns if no answer would fit."""
        fixed = 0 if self._options.system is None else 1
        while True:
            prompt = self._tokenizer.encode_chat(self.messages, **self._options.template)
            room = self._most - len(prompt)
            if room >= min(self._options.max_new_tokens, self._most // 4) or len(self.messages) <= fixed + 1:
                return prompt
            del self.messages[fixed : fixed + 2]
            self._err.print("[the oldest turn no longer fits and is forgotten]", style="dim")


def pieces(decode: Callable[[Sequence[int]], str], tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they arrive; "" while a character is incomplete."""
    detokenizer = Detokenizer(decode)
    for token in tokens:
        yield detokenizer.add([token])
    if rest := detokenizer.rest():
        yield rest
