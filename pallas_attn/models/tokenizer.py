"""Text to tokens and back, and chat templates, through the `tokenizers` library: no torch, no download."""

import datetime
from collections.abc import Sequence

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.tokenizer"):
    import jinja2
    import jinja2.sandbox
    import tokenizers


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
        chat_template: str | None,
    ):
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self._add_bos, self._template = add_bos, chat_template

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written out in it are recognised.

        No beginning-of-sequence token is put in front unless the model asks for one, and not twice. ValueError for what
        Python makes of bytes that are no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            fail("Tokenizer.encode", "text", "text that is Unicode", f"half a character, at {error.start}")
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
            ValueError: there is no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                "Tokenizer.apply_chat_template: expected a model with a chat template, got one without"
            )
        # The template comes out of a file from anywhere: it runs sandboxed. trim_blocks and lstrip_blocks are
        # what chat templates are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""

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
