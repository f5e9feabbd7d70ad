"""`pallas_attn.compat` against what it stands for: JAX's own references of the functions' meaning."""

import ast
import functools
import importlib
import importlib.util
import inspect
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as tpu
from support import unchecked

import pallas_attn
from pallas_attn import compat
from pallas_attn._call import dispatch

RNG = np.random.default_rng(0)
F32, I32 = jnp.float32, jnp.int32


def ragged_arguments(dtype=F32):
    kv = jnp.asarray(RNG.standard_normal((12, 8, 4, 32)), dtype)
    return {
        "q": jnp.asarray(RNG.standard_normal((20, 4, 32)), dtype),
        "kv_pages": kv,
        "kv_lens": jnp.array([17, 9, 30, 7], I32),
        "page_indices": jnp.asarray(np.append(RNG.permutation(12), [0] * 4).reshape(4, 4), I32),
        "cu_q_lens": jnp.array([0, 5, 6, 17, 99], I32),
        "num_seqs": jnp.array([3], I32),
    }


@pytest.mark.parametrize(
    "options", [{}, {"sm_scale": 0.3, "sliding_window": 6}, {"soft_cap": 2.0, "mask_value": None}], ids=str
)
def test_the_tpu_function(options):
    arguments = ragged_arguments()
    expected = tpu.ref_ragged_paged_attention(*arguments.values(), **options)
    out = jax.jit(functools.partial(compat.ragged_paged_attention, **options))(**arguments)
    assert out.shape == arguments["q"].shape
    np.testing.assert_allclose(out[:17], expected, rtol=2e-5, atol=2e-5)
    assert not out[17:].any()


def test_the_tpu_function_with_scales():
    arguments = ragged_arguments()
    quantised = dict(arguments, kv_pages=arguments["kv_pages"].astype(jnp.float8_e4m3fn))
    expected = tpu.ref_ragged_paged_attention(*quantised.values(), k_scale=0.5, v_scale=2.0)
    out = compat.ragged_paged_attention(**quantised, k_scale=0.5, v_scale=2.0)
    np.testing.assert_allclose(out[:17], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.once
def test_the_kernel_reads_keys_and_values_that_take_turns(monkeypatch):
    """As a GPU does it, in interpret mode."""
    arguments = ragged_arguments()
    expected = compat.ragged_paged_attention(**arguments)
    real = dispatch.resolve
    monkeypatch.setattr(
        dispatch, "resolve", lambda op, case, _, *more, **given: real(op, case, "interpret", *more, **given)
    )
    np.testing.assert_allclose(compat.ragged_paged_attention(**arguments), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("ours", "module", "sizes"),
    [
        (
            compat.paged_attention,
            "gpu.paged_attention",
            {
                "block_h",
                "pages_per_compute_block",
                "k_splits",
                "num_warps",
                "num_stages",
                "interpret",
                "debug",
            },
        ),
        (
            compat.ragged_paged_attention,
            "tpu.ragged_paged_attention",
            {"num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"},
        ),
    ],
    ids=["gpu", "tpu"],
)
def test_signatures_are_theirs(ours, module, sizes):
    """Names, order and defaults, but for what sizes another kernel's tiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        package = importlib.import_module(f"jax.experimental.pallas.ops.{module}")
    theirs = inspect.signature(getattr(package, ours.__name__)).parameters
    assert sizes <= theirs.keys()
    assert [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values() if p.name not in sizes
    ]


def gpu_arguments():
    pools = (jnp.asarray(RNG.standard_normal((2, 10, 8, 32)), F32) for _ in range(2))
    names = ("q", "k_pages", "v_pages", "block_tables", "lengths")
    q = jnp.asarray(RNG.standard_normal((3, 4, 32)), F32)
    tables = jnp.asarray(RNG.permutation(10)[:9].reshape(3, 3), I32)
    return dict(zip(names, (q, *pools, tables, jnp.array([20, 1, 24], I32)), strict=True))


def meant(q, k_pages, v_pages, block_tables, lengths, cap=None):
    """What JAX's docstring says, sequence by sequence."""
    out = np.zeros(q.shape)
    for seq, length in enumerate(np.asarray(lengths)):
        for head in range(q.shape[1]):
            k, v = (
                np.asarray(pool)[head // 2, np.asarray(block_tables)[seq]].reshape(-1, 32)[:length]
                for pool in (k_pages, v_pages)
            )
            logits = k @ np.asarray(q)[seq, head]
            logits = logits if cap is None else cap * np.tanh(logits / cap)
            weights = np.exp(logits - logits.max())
            out[seq, head] = weights / weights.sum() @ v
    return out


@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_gpu_function(cap):
    arguments = gpu_arguments()
    out = jax.jit(functools.partial(compat.paged_attention, attn_logits_soft_cap=cap))(**arguments)
    np.testing.assert_allclose(out, meant(**arguments, cap=cap), rtol=2e-5, atol=2e-5)
    full = compat.paged_attention(**{**arguments, "lengths": None})
    np.testing.assert_allclose(full, meant(**{**arguments, "lengths": [24] * 3}), rtol=2e-5, atol=2e-5)


def test_a_page_of_none_is_not_another_heads():
    arguments = gpu_arguments()
    arguments["block_tables"] = arguments["block_tables"].at[0, 0].set(10)
    out = compat.paged_attention(**arguments)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.zeros((3, 3, 32))}, ValueError, r"'q': expected a multiple of num_kv_heads \(2\), got 3"),
        ({"k_pages": jnp.zeros((2, 10, 8, 32), jnp.int8)}, TypeError, "'k_pages': expected dtype float32, got int8"),
        ({"v_pages": jnp.zeros((2, 9, 8, 32))}, ValueError, r"'v_pages': expected shape \[num_kv_heads=2 \(as k_pages"),
        ({"lengths": jnp.zeros(2, I32)}, ValueError, r"'lengths': expected shape \[batch_size=3 \(as q\)\], got \[2\]"),
        ({"k_scales_pages": jnp.zeros((2, 10, 8))}, ValueError, r"'k_scales_pages': expected None \(scales here are"),
        ({"mask_value": -1e9}, ValueError, r"'mask_value': expected the default \(-2.38"),
        ({"mask_value": "x"}, TypeError, "'mask_value': expected a number, got str"),
        ({"attn_logits_soft_cap": 0.0}, ValueError, "'attn_logits_soft_cap': expected a finite number above 0"),
        ({"attn_logits_soft_cap": 2.0**126}, ValueError, "'attn_logits_soft_cap': expected at most 1e\\+30, got 8.5"),
    ],
)  # fmt: skip
def test_refusals_of_the_gpu_function(changes, error, message):
    with pytest.raises(error, match=f"^compat.paged_attention: argument {message}"):
        unchecked(compat.paged_attention)(**gpu_arguments() | changes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_pages": jnp.zeros((12, 8, 3, 32))}, ValueError, r"'kv_pages': expected a multiple of keys and val"),
        ({"q": jnp.zeros((20, 3, 32))}, ValueError, r"'q': expected a multiple of num_kv_heads \(2\), got 3"),
        ({"kv_lens": jnp.zeros(2, I32)}, ValueError, r"'kv_lens': expected shape \[max_num_seqs=4 \(as page_in"),
        ({"num_seqs": jnp.zeros((), I32)}, ValueError, r"'num_seqs': expected shape \[1\], got \[\]"),
        ({"sm_scale": 0}, ValueError, "'sm_scale': expected a finite number above 0"),
        ({"soft_cap": -1.0}, ValueError, "'soft_cap': expected a finite number above 0"),
        ({"k_scale": 0.5}, ValueError, "'k_scale': expected None for a cache of float32, got a scale"),
        ({"mask_value": 0.0}, ValueError, "'mask_value': expected the default"),
    ],
)  # fmt: skip
def test_refusals_of_the_tpu_function(changes, error, message):
    with pytest.raises(error, match=f"^compat.ragged_paged_attention: argument {message}"):
        unchecked(compat.ragged_paged_attention)(**ragged_arguments() | changes)


def v3_arguments(dtype=F32, kv_heads=2, head_dim=40, cache_dtype=None):
    """Three sequences of 17, 9 and 30 tokens, of which 5, 1 and 11 are new; a fourth that is none."""
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    packing = 4 // jnp.dtype(cache_dtype).itemsize
    cache = RNG.standard_normal((12, 8, -(-2 * kv_heads // packing), packing, 128))
    key, value = RNG.standard_normal((2, 20, kv_heads, head_dim))
    return {
        "queries": jnp.asarray(RNG.standard_normal((20, 2 * kv_heads, head_dim)), dtype),
        "keys": jnp.asarray(key, cache_dtype),
        "values": jnp.asarray(value, cache_dtype),
        "kv_cache": jnp.asarray(cache, cache_dtype),
        "kv_lens": jnp.array([17, 9, 30, 77], I32),
        "page_indices": jnp.asarray(np.append(RNG.permutation(12), [2**30] * 4), I32),
        "cu_q_lens": jnp.array([0, 5, 6, 17, 99], I32),
        "distribution": jnp.array([0, 1, 3], I32),
    }


def v3_meant(
    arguments, sm_scale=1.0, sliding_window=None, soft_cap=None, k_scale=1.0, v_scale=1.0, causal=True
):
    """In float64, sequence by sequence: (out, pages by their number and slot [kv_heads, 2, head_dim])."""
    q, k, v = (np.asarray(arguments[name], np.float64) for name in ("queries", "keys", "values"))
    kv_heads, dim = k.shape[1:]
    cache = np.array(arguments["kv_cache"], np.float64).reshape(12, 8, -1, 128)
    tables = np.asarray(arguments["page_indices"]).reshape(4, 4)
    out = np.zeros(q.shape)
    for seq in range(3):
        first, end = np.asarray(arguments["cu_q_lens"])[seq : seq + 2]
        length = int(arguments["kv_lens"][seq])
        for token in range(first, end):
            at = length - (end - token)
            both = cache[tables[seq, at // 8], at % 8]
            both[:] = 0
            both[: 2 * kv_heads : 2, :dim], both[1 : 2 * kv_heads : 2, :dim] = k[token], v[token]
        rows = cache[tables[seq, : -(-length // 8)]].reshape(-1, cache.shape[2], 128)[:length]
        for token in range(first, end):
            at, seen = length - (end - token), np.arange(length)
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // kv_heads)
                logits = rows[:, 2 * kv, :dim] @ q[token, head] * sm_scale * k_scale
                logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
                if causal:
                    visible = (seen <= at) & (seen > at - (sliding_window or length + 1))
                    logits = np.where(visible, logits, -np.inf)
                weights = np.exp(logits - logits.max())
                out[token, head] = weights / weights.sum() @ rows[:, 2 * kv + 1, :dim] * v_scale
    return out, cache


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"sm_scale": 0.3}),
        ({"head_dim": 128, "kv_heads": 1}, {"sm_scale": 0.1, "sliding_window": 6, "soft_cap": 2.0}),
        ({"dtype": jnp.bfloat16, "kv_heads": 3}, {"sm_scale": 0.3}),
        (
            {"cache_dtype": jnp.float8_e4m3fn, "kv_heads": 1},
            {"sm_scale": 0.3, "k_scale": 0.5, "v_scale": 2.0},
        ),
        ({}, {"sm_scale": 0.3, "use_causal_mask": False, "sliding_window": 3}),
    ],
    ids=str,
)
def test_the_tpu_function_that_writes(sizes, options):
    arguments = v3_arguments(**sizes)
    meant = dict(options)
    expected, pages = v3_meant(arguments, causal=meant.pop("use_causal_mask", True), **meant)
    call = jax.jit(functools.partial(compat.ragged_paged_attention_v3, **options), donate_argnames="kv_cache")
    shape, dtype = arguments["kv_cache"].shape, arguments["queries"].dtype
    text = call.lower(**arguments).as_text()
    out, cache = call(**arguments)
    assert (out.dtype, cache.shape) == (dtype, shape)
    tolerance = 2e-5 if dtype == F32 else 3e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
    assert not out[17:].any()
    np.testing.assert_array_equal(np.asarray(cache, np.float64).reshape(pages.shape), pages)
    assert "tf.aliasing_output = 1" in text, "the pool is updated in place"


def test_a_shared_cache_is_read_and_not_written():
    arguments = v3_arguments()
    out, cache = compat.ragged_paged_attention_v3(**arguments, sm_scale=0.3)
    again = dict(arguments, kv_cache=cache, keys=arguments["keys"] * jnp.nan)
    shared, same = compat.ragged_paged_attention_v3(**again, sm_scale=0.3, update_kv_cache=False)
    np.testing.assert_array_equal(shared, out)
    np.testing.assert_array_equal(same, cache)


def test_the_signature_is_that_of_tpu_inference():
    """Names, order and defaults, but for what sizes another kernel's tiles and what debugs it. Their file is read, not
    run: it wants a TPU's packages."""
    spec = importlib.util.find_spec("tpu_inference")
    folders = [] if spec is None else spec.submodule_search_locations or []
    if not folders:
        pytest.skip("no tpu-inference")
    path = Path(folders[0]) / "kernels/ragged_paged_attention/v3/kernel.py"
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    (theirs,) = (node.args for node in functions if node.name == "ragged_paged_attention")
    defaults = {
        arg.arg: ast.literal_eval(default)
        for arg, default in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True)
        if default is not None
    }
    sizes = {"chunk_prefill_size", "d_block_sizes", "p_block_sizes", "m_block_sizes", "vmem_limit_bytes"}
    sizes |= {"debug_mode", "disable_bounds_checks", "disable_semaphore_checks"}
    assert sizes <= defaults.keys()
    ours = inspect.signature(compat.ragged_paged_attention_v3).parameters.values()
    positional = [p.name for p in ours if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [arg.arg for arg in theirs.args]
    keywords = {p.name: p.default for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {name: value for name, value in defaults.items() if name not in sizes}


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q_scale": 2.0},
            ValueError,
            r"'q_scale': expected None \(queries are not quantised here\), got 2.0",
        ),
        ({"skip_kv_mask": True}, ValueError, "'skip_kv_mask': expected False, got True"),
        ({"sm_scale": 0.0}, ValueError, "'sm_scale': expected"),
        ({"distribution": jnp.zeros(2, I32)}, ValueError, "'distribution': expected"),
        ({"page_indices": jnp.zeros(15, I32)}, ValueError, "'page_indices': expected"),
        ({"keys": jnp.zeros((20, 2, 40), jnp.bfloat16)}, TypeError, "'keys': expected"),
        (
            {"kv_cache": jnp.zeros((12, 8, 4, 1, 64))},
            ValueError,
            r"'kv_cache': expected pages of shape \[page_size, 4, 1, 128\], got \[12, 8, 4, 1, 64\]",
        ),
    ],
)
def test_refusals_of_the_tpu_function_that_writes(changes, error, message):
    with pytest.raises(error, match=f"compat.ragged_paged_attention_v3: argument {message}"):
        unchecked(compat.ragged_paged_attention_v3)(**{**v3_arguments(), **changes})


def test_it_is_found_where_people_look():
    """As an attribute, and from the functions and the page that they come to first."""
    assert pallas_attn.compat is compat
    page = (Path(__file__).parents[1] / "docs/pages/coming.md").read_text()
    for name in ("paged_attention", "ragged_paged_attention"):
        assert "`pallas_attn.compat`" in (getattr(pallas_attn, name).__doc__ or "")
        assert f"pallas_attn.compat.{name}" in page
    assert "pallas_attn.compat.ragged_paged_attention_v3" in page
