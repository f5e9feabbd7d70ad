"""Every refusal is one line that names the function, the argument, what was expected and what was given."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from support import unchecked

import pallas_attn
from pallas_attn import LocalStride, PagedAttentionConfig, paged_attention, write_kv
from pallas_attn._call import dispatch
from pallas_attn._lowering import cache, compiler

F32 = jnp.float32


def attention_arguments(**changes):
    arguments = {
        "query": jnp.zeros((2, 4, 64), F32),
        "key_cache": jnp.zeros((10, 16, 2, 64), F32),
        "value_cache": jnp.zeros((10, 16, 2, 64), F32),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "seq_lens": jnp.zeros((2,), jnp.int32),
    }
    return {**arguments, **changes}


BAD_ATTENTION = {
    "query rank": (
        {"query": jnp.zeros((2, 64), F32)},
        ValueError,
        r"argument 'query': expected shape \[num_seqs, num_heads, head_dim\] or "
        r"\[num_seqs, q_len, num_heads, head_dim\], got \[2, 64\]",
    ),
    "query dtype": (
        {"query": jnp.zeros((2, 4, 64), jnp.int32)},
        TypeError,
        "argument 'query': expected dtype bfloat16 or float16 or float32, got int32",
    ),
    "query type": ({"query": [[1.0]]}, TypeError, "argument 'query': expected an array, got list"),
    "cache dtype": (
        {"key_cache": jnp.zeros((10, 16, 2, 64), jnp.bfloat16)},
        TypeError,
        "argument 'key_cache': expected dtype float32 or float8_e4m3fn or float8_e5m2 or int8, got bfloat16",
    ),
    "head_dim": (
        {"key_cache": jnp.zeros((10, 16, 2, 32), F32)},
        ValueError,
        r"argument 'key_cache': expected shape \[num_pages, page_size, num_kv_heads, head_dim=64 \(as query\)\], "
        r"got \[10, 16, 2, 32\]",
    ),
    "value shape": (
        {"value_cache": jnp.zeros((9, 16, 2, 64), F32)},
        ValueError,
        r"argument 'value_cache': expected shape \[num_pages=10 \(as key_cache\)",
    ),
    "tables rows": (
        {"block_tables": jnp.zeros((3, 3), jnp.int32)},
        ValueError,
        r"argument 'block_tables': expected shape \[num_seqs=2 \(as query\), max_pages\], got \[3, 3\]",
    ),
    "tables dtype": (
        {"block_tables": jnp.zeros((2, 3), jnp.uint8)},
        TypeError,
        "argument 'block_tables': expected dtype int32, got uint8",
    ),
    "lens rank": (
        {"seq_lens": jnp.zeros((2, 1), jnp.int32)},
        ValueError,
        r"argument 'seq_lens': expected shape \[num_seqs=2 \(as query\)\], got \[2, 1\]",
    ),
    "no table columns": (
        {"block_tables": jnp.zeros((2, 0), jnp.int32)},
        ValueError,
        r"argument 'block_tables': expected no empty dimension, got shape \[2, 0\]",
    ),
    "heads": (
        {"query": jnp.zeros((2, 3, 64), F32)},
        ValueError,
        r"argument 'query': expected a multiple of num_kv_heads \(2\), got 3",
    ),
    "scale": (
        {"scale": -1.0},
        ValueError,
        "argument 'scale': expected a finite number above 0, or None, got -1.0",
    ),
    "return_lse": (
        {"return_lse": "no"},
        TypeError,
        "argument 'return_lse': expected True or False, got 'no' of type str",
    ),
    "layout": (
        {"layout": "NDH"},
        ValueError,
        "argument 'layout': expected one of 'NHD', 'HND', 'PACKED', got 'NDH'",
    ),
    "implementation": (
        {"implementation": "mosaic"},
        ValueError,
        "argument 'implementation': expected None or one of 'pallas', 'triton', 'xla', 'interpret', got 'mosaic'",
    ),
    "config type": (
        {"implementation": "interpret", "config": 4},
        TypeError,
        "argument 'config': expected PagedAttentionConfig, got int",
    ),
    "config for xla": (
        {"implementation": "xla", "config": PagedAttentionConfig(16, 16, 1)},
        ValueError,
        "argument 'config': expected None for implementation 'xla'",
    ),
}


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_of_a_narrow_type_are_looked_at_as_float32(name, recwarn):
    for wrong in (np.float16(0), np.float16("inf")):
        with pytest.raises(ValueError, match=f"argument '{name}': expected a finite number above 0"):
            unchecked(paged_attention)(**attention_arguments(**{name: wrong}))
    unchecked(paged_attention)(**attention_arguments(**{name: np.float16(0.1)}), implementation="xla")
    assert not recwarn.list


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_paged_attention_refuses(name):
    changes, error, message = BAD_ATTENTION[name]
    with pytest.raises(error, match=f"^paged_attention: {message}") as caught:
        unchecked(paged_attention)(**attention_arguments(**changes))
    assert "\n" not in str(caught.value)


BAD_WRITE = {
    "key rank": (
        {"key": jnp.zeros((3, 64), F32)},
        ValueError,
        r"argument 'key': expected shape \[num_tokens, num_kv_heads=2 \(as key_cache\), head_dim=64 \(as key_cache\)\]",
    ),
    "value dtype": (
        {"value": jnp.zeros((3, 2, 64), jnp.bfloat16)},
        TypeError,
        "argument 'value': expected dtype float32, got bfloat16",
    ),
    "slots": (
        {"slot_mapping": jnp.zeros((4,), jnp.int32)},
        ValueError,
        r"argument 'slot_mapping': expected shape \[num_tokens=3 \(as key\)\], got \[4\]",
    ),
    "cache dtype": (
        {"key_cache": jnp.zeros((10, 16, 2, 64), jnp.int32)},
        TypeError,
        "argument 'key_cache': expected dtype bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2 or int8, "
        "got int32",
    ),
}


@pytest.mark.parametrize("name", BAD_WRITE)
def test_write_kv_refuses(name):
    arguments = {
        "key": jnp.zeros((3, 2, 64), F32),
        "value": jnp.zeros((3, 2, 64), F32),
        "key_cache": jnp.zeros((10, 16, 2, 64), F32),
        "value_cache": jnp.zeros((10, 16, 2, 64), F32),
        "slot_mapping": jnp.zeros((3,), jnp.int32),
    }
    changes, error, message = BAD_WRITE[name]
    with pytest.raises(error, match=f"^write_kv: {message}"):
        unchecked(write_kv)(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_q": 4}, "argument 'block_q': expected a power of two >= 8, got 4"),
        ({"block_kv": 48}, "argument 'block_kv': expected a power of two >= 16, got 48"),
        ({"num_splits": -1}, "argument 'num_splits': expected at least 0, got -1"),
        ({"split_tokens": -1}, "argument 'split_tokens': expected at least 0, got -1"),
        ({"num_warps": 3}, "argument 'num_warps': expected a power of two >= 1, got 3"),
    ],
)
def test_config_refuses(fields, message):
    with pytest.raises(ValueError, match=f"^PagedAttentionConfig: {message}"):
        PagedAttentionConfig(**{"block_q": 16, "block_kv": 16, "num_splits": 1, **fields})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the reason given depends on the device")
def test_forced_pallas_without_a_gpu_raises_with_the_reason():
    message = "implementation 'pallas' cannot serve this call: needs an NVIDIA GPU, the device is 'cpu'"
    with pytest.raises(ValueError, match=message):
        paged_attention(**attention_arguments(implementation="pallas"))


def test_refused_pallas_on_a_gpu_falls_back_with_a_warning():
    """head_dim 1024 is beyond the kernel: the slow path serves, and says so."""
    shapes = attention_arguments(
        query=jnp.zeros((2, 4, 1024), F32),
        key_cache=jnp.zeros((10, 16, 2, 1024), F32),
        value_cache=jnp.zeros((10, 16, 2, 1024), F32),
    )
    with pytest.warns(
        UserWarning, match="slow 'xla' implementation because pallas: head_dim is at most 512, got 1024"
    ):
        lowering.lower_for_gpu(paged_attention, *shapes.values())


def test_without_a_compiler_the_slow_path_says_what_to_install(monkeypatch):
    monkeypatch.setitem(dispatch.installed, "pallas", lambda: "jax 1.0 has no Pallas-Triton lowering")
    monkeypatch.setattr(compiler, "installed", lambda: None)
    monkeypatch.setenv(cache.FOLDER, "/nonexistent")
    message = r"pallas: jax 1.0 has no .*; triton: Triton is not installed: pip install 'triton>=3.6,<3.10'"
    with pytest.warns(UserWarning, match=message):
        lowering.lower_for_gpu(paged_attention, *attention_arguments().values())


def test_an_old_gpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="needs sm_80 or newer, the device is sm_75"):
        _lower_forced("Tesla T4", 40)


def _lower_forced(kind: str, cores: int) -> None:
    def forced(*arguments):
        return paged_attention(*arguments, implementation="pallas")

    lowering.lower_for_gpu(forced, *attention_arguments().values(), device=(kind, cores))


def test_chosen_implementation_can_be_recorded():
    with pallas_attn.record_implementations() as chosen:
        jax.eval_shape(paged_attention, *attention_arguments().values())
    assert chosen == {"paged_attention": "pallas" if jax.default_backend() == "gpu" else "xla"}


def test_available_implementations_give_reasons():
    available = pallas_attn.available_implementations()
    assert available["paged_attention"]["xla"] is None
    assert available["paged_attention"]["interpret"] is None
    if jax.default_backend() == "cpu":
        assert "needs an NVIDIA GPU" in available["write_kv"]["pallas"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((64, 1.5, 2), TypeError, "'local_blocks': expected an int, got 1.5 of type float"),
        ((64.0, 1, 2), TypeError, "'block_size': expected an int"),
        ((64, 1, 2, "1"), TypeError, "'head_sliding_step': expected an int"),
        ((16, 2, 2**31 - 1), ValueError, "'vert_stride': expected at most 67108864"),
    ],
)
def test_pattern_messages(fields, error, message):
    with pytest.raises(error, match=f"^LocalStride: argument {message}"):
        as_users_make(LocalStride, fields)


def test_a_pattern_of_narrow_ints_is_one_of_ints():
    pattern = as_users_make(LocalStride, [np.int8(field) for field in (64, 1, 5, 100, 100)])
    heads = {"num_heads": 4, "num_kv_heads": 2}
    assert pattern.offset(3, 1, **heads) == LocalStride(64, 1, 5, 100, 100).offset(3, 1, **heads)


def test_config_fields_are_ints():
    with pytest.raises(TypeError, match=r"^PagedAttentionConfig: argument 'num_splits': expected an int"):
        as_users_make(PagedAttentionConfig, (16, 16, 1.5))


def as_users_make(dataclass, fields):
    """Without the type checks that jaxtyping adds in tests."""
    made = object.__new__(dataclass)
    for field, given in itertools.zip_longest(dataclasses.fields(dataclass), fields):
        object.__setattr__(made, field.name, field.default if given is None else given)
    made.__post_init__()
    return made
