"""Tokenizer and chat template of a GGUF file, through the `tokenizers` library: no torch, no download."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.tokenizer"):
    import jinja2
    import jinja2.sandbox
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

# Values of `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4


def _byte_level(*, split_digits: bool) -> pre_tokenizers.PreTokenizer:
    bytes_and_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not split_digits:
        return bytes_and_words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_and_words])


# How text is cut before merging, by `tokenizer.ggml.pre`. Cutting differently gives other tokens without any
# error, so a name that is not listed here is refused.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(split_digits=False),
    "smollm": lambda: _byte_level(split_digits=True),
}


def _strings(metadata: Callable[[str], Any], name: str) -> list[str]:
    found = metadata(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found:
        raise ValueError(f"Tokenizer: tokenizer.ggml.{name}: expected a list of strings, got {found!r:.40}")
    return found


def _merge(text: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not {left, right, left + right} <= vocabulary.keys():
        raise ValueError(
            f"Tokenizer: tokenizer.ggml.merges: expected two tokens that together are a token, got {text!r}"
        )
    return left, right


class Tokenizer:
    """Byte-level BPE tokenizer with its special tokens and chat template.

    Attributes:
        vocab_size: number of tokens.
        bos_token_id, eos_token_id: ids, or ``None`` where the file names none.
        stop_token_ids: the tokens that end an answer.

    Args:
        metadata: reads a GGUF metadata value by its name, ``None`` where the file lacks it.

    Raises:
        ValueError: the file's kind of tokenizer or pre-tokenizer is not one this class can reproduce.
    """

    def __init__(self, metadata: Callable[[str], Any]):
        kind, cut = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre")
        if kind != "gpt2":
            raise ValueError(
                f"Tokenizer: tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}"
            )
        if cut not in _PRE_TOKENIZERS:
            known = " or ".join(map(repr, sorted(_PRE_TOKENIZERS)))
            raise ValueError(f"Tokenizer: tokenizer.ggml.pre: expected {known}, got {cut!r}")
        self._tokens: list[str] = _strings(metadata, "tokens")
        self.vocab_size = len(self._tokens)
        types = metadata("tokenizer.ggml.token_type")
        if not isinstance(types, list) or len(types) != len(self._tokens):
            got = f"{len(types)}" if isinstance(types, list) else "none"
            raise ValueError(
                f"Tokenizer: tokenizer.ggml.token_type: expected one for each of {self.vocab_size} tokens, got {got}"
            )
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        merges = [_merge(text, vocabulary) for text in _strings(metadata, "merges")]
        self._tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
        self._tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cut]()
        self._tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(self._tokens, types, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                special = kind == _CONTROL
                self._tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])

        self.bos_token_id: int | None = metadata("tokenizer.ggml.bos_token_id")
        self.eos_token_id: int | None = metadata("tokenizer.ggml.eos_token_id")
        ends = (self.eos_token_id, metadata("tokenizer.ggml.eot_token_id"))
        for token_id in (self.bos_token_id, *ends):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"Tokenizer: tokenizer.ggml.*_token_id: expected ids in [0, {self.vocab_size}), got {token_id}"
                )
        self.stop_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self._add_bos = bool(metadata("tokenizer.ggml.add_bos_token"))
        self._template: str | None = metadata("tokenizer.chat_template")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written out in it are recognised.

        No beginning-of-sequence token is put in front unless the file asks for one, and not twice.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation as the text the model was trained on.

        Args:
            messages: dictionaries with ``role`` (``system``, ``user``, ``assistant``) and ``content``.
            add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
            ValueError: the file has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise ValueError("Tokenizer.apply_chat_template: the file has no tokenizer.chat_template")
        # The template comes out of a file from anywhere: it runs sandboxed. trim_blocks and lstrip_blocks are
        # what chat templates are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else self._tokens[token_id]

        try:
            return environment.from_string(self._template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=text_of(self.bos_token_id),
                eos_token=text_of(self.eos_token_id),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"Tokenizer.apply_chat_template: the template refused: {error}") from error


def _refuse(message: str):
    raise jinja2.TemplateError(message)
