"""Text to tokens and back, and chat templates, through the `tokenizers` library: no torch, no download."""

from collections.abc import Mapping, Sequence
from typing import Any

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.tokenizer"):
    import tokenizers

from . import chat_template as chat_template_module
from .chat_template import Templates


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Attributes:
        vocab_size: number of tokens.
        bos_token_id, eos_token_id: ids, or ``None`` where there is none.
        stop_token_ids: the tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        stop_token_ids: Sequence[int],
        add_bos: bool,
        chat_template: Templates,
        special_tokens: Mapping[str, str] | None = None,
    ):
        # Truncation and padding are up to the caller, not to settings left over from training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self._add_bos, self._template = add_bos, chat_template
        # Special tokens by the names that templates use.
        ids = {"bos_token": bos_token_id, "eos_token": eos_token_id}
        known = {name: tokenizer.id_to_token(token) for name, token in ids.items() if token is not None}
        self._special_tokens = {name: text for name, text in known.items() if text} | dict(
            special_tokens or {}
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it are recognised.

        No beginning-of-sequence token is put in front unless the model asks for one, and not twice; without
        `add_special_tokens` none. ValueError for what Python makes of bytes that are no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            fail("Tokenizer.encode", "text", "text that is Unicode", f"half a character, at {error.start}")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        begins = add_special_tokens and self._add_bos
        if begins and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Renders a conversation as the text the model was trained on; what transformers' tokenizers make of it.

        Args:
            messages: dictionaries with ``role`` (``system``, ``user``, ``assistant``) and ``content``, and whatever
                else the template reads (``tool_calls``, ``reasoning_content``).
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: what the model may call, as JSON schemas; functions too where transformers is installed.
            documents: dictionaries with ``title`` and ``text``.
            chat_template: a template in place of the model's, or the name of one of its several.
            **variables: further ones that the template reads, such as ``enable_thinking``.

        Raises:
            TypeError: messages or tools of another kind.
            ValueError: there is no chat template, or the template refuses the messages.
        """
        template = chat_template_module.template_for(self._template, chat_template, tools)
        return chat_template_module.render(
            template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `apply_chat_template`; what the template does not write, is not there."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)
