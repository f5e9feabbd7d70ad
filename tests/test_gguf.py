"""What comes out of a GGUF file: weights, sizes, tokenizer, chat template, and errors for broken files."""

import copy
import dataclasses
import re

import gguf
import numpy as np
import pytest
from models_support import TINY, smollm2_path, smollm2_tokenizer, tiny_llama, write_tiny
from tokenizers import pre_tokenizers

from pallas_attn.models import generate, gguf_loader, load_gguf
from pallas_attn.models.gguf_loader import rotary_halves

pytestmark = pytest.mark.once  # files

TRICKY = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\n\n\r\nand   runs of spaces",
    "I'll can't won't they'd we've I'm it's DON'T",
    "In 1984 there were 3.14159 reasons; 100,000 of them wrong.",
    "naïve café — “quotes” … €",
    "日本語のテキスト、中文文本 그리고 한국어",
    "Ελληνικά עברית العربية हिन्दी ไทย",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🤷🏽‍♀️ e\u0301 vs é",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x != y: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start |> <|endoftext|><|im_end|>glued<repo_name>x",
    "zero\u200bwidth \ufeffBOM \u00a0nbsp \x00nul \x7f",
    "supercalifragilisticexpialidocious" * 3,
    "https://example.com/a?b=c&d=%20e#f @user #tag $9.99",
]
# Where cutting off digits first makes a difference.
NUMERALS = ["x  7", "a   12 b", "½ ⅷ", "²³ ٣٤٥ 七"]


@pytest.fixture(scope="module")
def reference():
    """transformers' tokenizer of the same file."""
    transformers = pytest.importorskip("transformers")
    path = smollm2_path()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_tokens_are_those_of_transformers(reference):
    ours = smollm2_tokenizer()
    for text in TRICKY:
        ids = ours.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False), repr(text)
        for skip in (True, False):
            text_back = ours.decode(ids, skip_special_tokens=skip)
            assert text_back == reference.decode(ids, skip_special_tokens=skip), repr(text)
        assert text_back == text


def test_digits_are_cut_off_before_anything_merges(reference):
    """The file says `smollm`, which is: every digit by itself, then GPT-2's cut (so it is in llama.cpp).

    transformers ignores that name and cuts as GPT-2 does, which glues spaces and other numerals to the digits.
    """
    ours = smollm2_tokenizer()
    backend = copy.deepcopy(reference.backend_tokenizer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    for text in [*TRICKY, *NUMERALS]:
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids, repr(text)
    assert ours.encode("x  7") == [*ours.encode("x"), *ours.encode("  "), *ours.encode("7")]


def test_stop_tokens():
    tokenizer = smollm2_tokenizer()
    assert tokenizer.stop_token_ids == tuple(tokenizer.encode("<|im_end|>"))
    assert tokenizer.vocab_size == 49152


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  padded \n"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "{{ 3 }} <b>&amp;"},
    ],
]


def test_chat_template_is_rendered_as_transformers_does(reference):
    ours = smollm2_tokenizer()
    for messages in CONVERSATIONS:
        for add in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
            assert ours.apply_chat_template(messages, add_generation_prompt=add) == expected


def test_rotary_halves_undoes_what_llama_cpp_does():
    num_heads, head_dim, size = 3, 8, 5
    rows = np.arange(num_heads * head_dim * size).reshape(-1, size)
    # llama.cpp's converter: pairs (i, i + head_dim / 2) become neighbours.
    written = rows.reshape(num_heads, 2, head_dim // 2, size).swapaxes(1, 2).reshape(rows.shape)
    assert (written != rows).any()
    np.testing.assert_array_equal(rotary_halves(written, num_heads), rows)


def test_a_written_model_reads_back(tmp_path):
    reports = []
    loaded = load_gguf(write_tiny(tmp_path / "tiny.gguf"), progress=lambda *r: reports.append(r))
    # The file keeps it in float32.
    assert loaded.model.config.rms_norm_eps == pytest.approx(TINY.rms_norm_eps)
    assert dataclasses.replace(loaded.model.config, rms_norm_eps=TINY.rms_norm_eps) == TINY
    assert loaded.name == "tiny"
    assert reports[-1] == (len(reports), len(reports))
    assert loaded.tokenizer.encode("abcab<|end|>") == [2, 1, 0]
    assert loaded.tokenizer.stop_token_ids == (0,)
    with pytest.raises(ValueError, match=r"expected a model with a chat template"):
        loaded.tokenizer.apply_chat_template([])
    prompts = [[5, 6, 7, 8], [9, 10]]
    got = generate(loaded.model, prompts, max_new_tokens=6, return_logits=True)
    expected = generate(tiny_llama(), prompts, max_new_tokens=6, return_logits=True)
    np.testing.assert_array_equal(got.logits, expected.logits)


def test_bfloat16_weights_are_the_rounded_float32_ones(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    wide = np.asarray(load_gguf(path).model.layers.mlp.down_proj.kernel[...])
    narrow = np.asarray(load_gguf(path, dtype="bfloat16").model.layers.mlp.down_proj.kernel[...])
    np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "expected general.architecture 'llama', got 'gemma'"),
        ({"skip": "blk.1.attn_v"}, "expected a tensor blk.1.attn_v.weight, got none"),
        ({"skip": "token_embd"}, "expected a tensor token_embd.weight, got none"),
        (
            {"rope_scaling": gguf.RopeScalingType.YARN},
            "expected llama.rope.scaling.type to be 'none' or missing, got 'yarn'",
        ),
        ({"tokenizer": "llama"}, "tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got 'llama'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre: expected 'gpt-2' or 'smollm', got 'deepseek-llm'"),
        ({"merges": ["a b", "ab d"]}, "expected two tokens that together are a token, got 'ab d'"),
        ({"merges": ["ab"]}, "expected two tokens that together are a token, got 'ab'"),
        ({"token_types": [3, 1]}, "tokenizer.ggml.token_type: expected one for each of 97 tokens, got 2"),
        ({"eos": 97}, "tokenizer.ggml.*_token_id: expected ids in [0, 97), got 97"),
        (
            {"more": {"blk.0.attn_q.bias": np.full(48, 50, np.float32)}},
            "expected only tensors that a Llama uses, got 'blk.0.attn_q.bias'",
        ),
        (
            {"more": {"rope_freqs.weight": np.ones(4, np.float32), "x": np.ones(4, np.float32)}},
            "expected only tensors that a Llama uses, got 'rope_freqs.weight' and 1 more",
        ),
        (
            {"numbers": {"attention.sliding_window": 16}},
            "expected llama.attention.sliding_window to be 0 or missing, got 16",
        ),
        ({"numbers": {"expert_count": 8}}, "expected llama.expert_count to be 0 or missing, got 8"),
        (
            {"numbers": {"rope.scaling.factor": 4.0}},
            "no metadata that changes how a Llama computes, got llama.rope.scaling.factor = 4.0",
        ),
        (
            {"numbers": {"new_idea": 1}},
            "no metadata that changes how a Llama computes, got llama.new_idea = 1",
        ),
        (
            {"numbers": {"attention.value_length": 4}},
            "expected llama.attention.value_length as wide as a head, 8, got 4",
        ),
        (
            {"numbers": {"rope.dimension_count": 4}},
            "expected llama.rope.dimension_count as wide as a head, 8, got 4",
        ),
        (
            {"numbers": {"attention.key_length": 0}},
            "'llama.attention.key_length': expected at least 1, got 0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_we_cannot_run_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_gguf(write_tiny(tmp_path / "tiny.gguf", **changes))
    assert "\n" not in str(raised.value)


def test_what_cannot_be_run_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(gguf_loader._Weights, "__call__", read)
    for changes in ({"tokenizer": "llama"}, {"merges": ["a d"]}, {"more": {"x": np.ones(4, np.float32)}}):
        with pytest.raises(ValueError, match="expected"):
            load_gguf(write_tiny(tmp_path / "tiny.gguf", **changes))


def test_metadata_that_says_what_is_so_anyway_is_no_obstacle(tmp_path):
    numbers = {"expert_count": 0, "logit_scale": 1.0, "attention.key_length": 8, "rope.dimension_count": 8}
    path = write_tiny(tmp_path / "tiny.gguf", numbers=numbers, rope_scaling=gguf.RopeScalingType.NONE)
    assert load_gguf(path).model.config.head_dim == 8


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"load_gguf: argument 'path': expected an existing GGUF file"
    ):
        load_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 3000, -1, -1000])
def test_a_truncated_file_is_refused(keep, tmp_path):
    whole = write_tiny(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="expected a complete GGUF file") as raised:
        load_gguf(path)
    assert "\n" not in str(raised.value)


def test_garbage_is_refused(tmp_path):
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + np.random.default_rng(0).bytes(4000))
    with pytest.raises(ValueError, match="expected a complete GGUF file"):
        load_gguf(path)
