"""The tokenizer that a GGUF file describes: byte-level BPE, cut as the file's pre-tokenizer cuts."""

from collections.abc import Callable
from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.gguf_tokenizer"):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

from .tokenizer import Tokenizer

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


def gguf_tokenizer(metadata: Callable[[str], Any]) -> Tokenizer:
    """Args:
        metadata: reads a GGUF metadata value by its name, ``None`` where the file lacks it.

    Raises:
        ValueError: the file's kind of tokenizer or pre-tokenizer is not one that can be reproduced.
    """
    kind, cut = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"Tokenizer: tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}")
    if cut not in _PRE_TOKENIZERS:
        known = " or ".join(map(repr, sorted(_PRE_TOKENIZERS)))
        raise ValueError(f"Tokenizer: tokenizer.ggml.pre: expected {known}, got {cut!r}")
    tokens = _strings(metadata, "tokens")
    vocab_size = len(tokens)
    types = metadata("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        got = f"{len(types)}" if isinstance(types, list) else "none"
        raise ValueError(
            f"Tokenizer: tokenizer.ggml.token_type: expected one for each of {vocab_size} tokens, got {got}"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [_merge(text, vocabulary) for text in _strings(metadata, "merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])

    bos, eos = (metadata(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    ends = (eos, metadata("tokenizer.ggml.eot_token_id"))
    for token_id in (bos, *ends):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise ValueError(
                f"Tokenizer: tokenizer.ggml.*_token_id: expected ids in [0, {vocab_size}), got {token_id}"
            )
    return Tokenizer(
        tokenizer,
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=[end for end in ends if end is not None],
        add_bos=bool(metadata("tokenizer.ggml.add_bos_token")),
        chat_template=metadata("tokenizer.chat_template"),
    )
