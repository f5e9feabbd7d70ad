"""The parts of the server that need no socket: texts, calls of tools, fields."""

import json
import random

import pytest
from serve_support import END, byte_tokenizer

from pallas_attn.models import Sampling, TokenLogprobs
from pallas_attn.models.detokenizer import Detokenizer
from pallas_attn.serve.errors import ApiError, json_bytes
from pallas_attn.serve.fields import Fields, parsed
from pallas_attn.serve.text import AnswerText
from pallas_attn.serve.tool_calls import ToolCalls

pytestmark = pytest.mark.once

TEXTS = ["", "plain", "héllo wörld", "日本語のテキスト", "🙂🙃👩‍👩‍👧‍👦!", "a\ufffdb", "ends in \ufffd"]


def cut(tokens, seed):
    """In pieces of drawn sizes."""
    rng, tokens = random.Random(seed), list(tokens)
    while tokens:
        count = rng.randint(1, 5)
        yield tokens[:count]
        tokens = tokens[count:]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_characters_come_out_whole(text, seed):
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.add(piece) for piece in cut(tokens, seed)] + [detokenizer.rest()]
    assert "".join(pieces) == text == tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        single = Detokenizer(tokenizer.decode)
        alone = [single.add([token]) for token in tokens]
        assert all(
            len(piece.encode()) in (0, 1, 2, 3, 4) for piece in alone
        )  # none waits longer than it must


@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_come_out_as_they_are_decoded(seed):
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(300)]
    detokenizer = Detokenizer(tokenizer.decode)
    text = "".join([detokenizer.add(piece) for piece in cut(tokens, seed)]) + detokenizer.rest()
    assert text == tokenizer.decode(tokens)


def test_what_never_becomes_a_character_is_not_held_back_for_ever():
    tokenizer = byte_tokenizer()
    broken = tokenizer.encode("é")[:1] * 200
    detokenizer = Detokenizer(tokenizer.decode)
    assert "".join(detokenizer.add([token]) for token in broken).count("\ufffd") >= 100


def test_a_space_behind_a_token_without_text_stays():
    """Decoders of SentencePiece drop the first space of what they are given."""
    words = {1: "", 2: " a", 3: " b"}
    detokenizer = Detokenizer(lambda ids: "".join(words[each] for each in ids).removeprefix(" "))
    assert "".join(detokenizer.add([token]) for token in (2, 1, 3)) == "a b"


@pytest.mark.parametrize("stops", [["STOP"], ["never", "OP he"], ["日本", "P h"], ["no such"]])
@pytest.mark.parametrize("seed", range(3))
def test_stop_texts_split_over_tokens(stops, seed):
    tokenizer, text = byte_tokenizer(), "before ST STO STOP here 日本語"
    sampling = Sampling(stop=stops, logprobs=0)
    for described in (False, True):
        answer = AnswerText(tokenizer, sampling if described else Sampling(stop=stops))
        tokens, pieces = tokenizer.encode(text), []
        for new in cut([*tokens, END], seed):
            pieces.append(answer.add(new, [TokenLogprobs(-1.0, ())] * len(new)))
        pieces.append(answer.end())
        shown = "".join(piece.text for piece in pieces)
        assert shown == sampling.cut(text)
        assert answer.ended == (shown != text)
        if described:
            told = [token for piece in pieces for token in piece.tokens]
            assert [token.offset for token in told] == sorted(token.offset for token in told)
            assert "".join(token.text for token in told if "\ufffd" not in token.text) in text
            assert all(token.offset < len(shown) for token in told)
            assert len(told) >= len(shown)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("no call at all", "no call at all", []),
        (CALL, "", [("add", {"a": 1, "b": "ü"})]),
        (f"\n\n{CALL}\n{CALL}\n", "", [("add", {"a": 1, "b": "ü"})] * 2),
        (f"Let me see. {CALL}\n Done.", "Let me see.Done.", [("add", {"a": 1, "b": "ü"})]),
        (f"{CALL[:-12]}", "", [("add", {"a": 1, "b": "ü"})]),  # the closing left out
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('{"half": ', '{"half": ', []),
        ("<tool_call>not JSON</tool_call> and on", "<tool_call>not JSON</tool_call> and on", []),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>',) * 2 + ([],),
        ("<tool_call>[1]</tool_call>",) * 2 + ([],),
        ("a <tool_ and < and <tool_call",) * 2 + ([],),
        ("<tool_call>" + "[" * 100_000,) * 2 + ([],),
        ("   ", "   ", []),
    ],
)
def test_calls_of_tools(text, shown, calls):
    sizes = (1, 3, 7, len(text)) if len(text) < 1000 else (5000,)
    for size in sizes:
        found = ToolCalls(frozenset(["add"]))
        said = [found.shown(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(said) + found.rest() == shown
        functions = [call["function"] for call in found.calls]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
        assert len({call["id"] for call in found.calls}) == len(calls)


def test_half_a_character_is_an_escape():
    assert json.loads(json_bytes({"a": "\ud83d é"})) == {"a": "\ud83d é"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b"[1]", "an array"),
        (b"null", "null"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"[" * 200_000, "depth"),
        (b'{"a": ' + b"1" * 5000 + b"}", "JSON"),
    ],
)
def test_what_is_no_object(body, says):
    with pytest.raises(ApiError, match=f"^body: expected .*{says}"):
        parsed(body)


def test_fields_of_other_types_are_refused():
    for kind, value in ((int, True), (int, 1.0), (float, "1"), (str, 1), (list, {}), (dict, []), (bool, 1)):
        with pytest.raises(ApiError, match=r"^x\.a: expected an? \w+, got ") as caught:
            Fields({"a": value}, "x.").take("a", kind)
        assert caught.value.param == "x.a"
    assert Fields({"a": 1}).take("a", float) == 1
    assert Fields({"a": None}).take("a", int, default=3) == 3
    fields = Fields({"a": True})
    with pytest.raises(ApiError, match="expected 1"):
        fields.neutral("a", 1)
