"""`prefix_prefill` and `mla_prefill` by the CUDA kernel of csrc/attention: on the GPU against float64, and lowered."""

import jax.numpy as jnp
import numpy as np
import pytest
import support
import test_mla_prefill as mla
import test_prefix_prefill as prefix
from lowering import lower_for_gpu

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles

gpu = pytest.mark.gpu
made = prefix.make_case
# Decoded sequences are another launch's in one of them.
ALL, LONG = prefix.WHOLE, RaggedAttentionConfig(RaggedTiles(32, 32, 1), RaggedTiles(16, 32, 1))
CASES = [
    (made(head_dim=128), ALL),
    (made(num_heads=8, head_dim=128), LONG),
    (made(head_dim=128, page_size=1), ALL),
    (made(head_dim=64, page_size=3, dtype="float16", layout="HND", sliding_window=40), ALL),
    (made(head_dim=120, page_size=256, softcap=3.0, alibi=True, sinks=True), ALL),
    (made(head_dim=80, page_size=24, causal=False, sinks=True), ALL),
    (made(head_dim=192, value_dim=128, page_size=64), ALL),
    (made(head_dim=192, page_size=8, sliding_window=90), ALL),
    (made(head_dim=256, dtype="float16"), LONG),
    (made(head_dim=256, page_size=2), ALL),
    (made(head_dim=128, cache_dtype="float8_e4m3fn", scale_per_head=True), ALL),
    (made(head_dim=128, page_size=1, cache_dtype="int8", scale_per_head=True, sliding_window=60), LONG),
    (made(head_dim=64, cache_dtype="float8_e4m3fn", scale_per_page=True, dtype="float16", layout="HND"), ALL),
    (made(head_dim=192, value_dim=128, cache_dtype="int8", scale_per_page=True, softcap=9.0), ALL),
    (made(head_dim=256, cache_dtype="float8_e4m3fn", scale_per_head=True, alibi=True), ALL),
]


@gpu
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda value: getattr(value, "id", ""))
def test_matches_reference(case, config):
    prefix.test_matches_reference(case, config, "cuda")


@gpu
def test_promises():
    prefix.test_decoded_sequences_are_left_to_others("cuda")
    prefix.test_lengths_that_cannot_be_right_are_nan("cuda")


@gpu
@pytest.mark.parametrize("page_size", [16, 1])
def test_a_bad_page_where_pages_end(page_size):
    """Within a box, or a key tile, that new tokens share: their sequence is NaN, and no other."""
    case = made(head_dim=128, page_size=page_size)
    data, key, value, _ = prefix.make_apart(case)
    good, _ = prefix.run(case, data, key, value, "cuda")
    context = case.seq_lens[0] - case.q_lens[0]
    data.block_tables[0, (context - 1) // page_size] = -1
    out, _ = prefix.run(case, data, key, value, "cuda")
    mine = np.arange(len(out)) < case.q_lens[0]
    assert np.isnan(np.float32(out[mine])).all()
    np.testing.assert_array_equal(np.float32(out[~mine]), np.float32(good[~mine]))


@gpu
@pytest.mark.parametrize("form", ["projected", None])
def test_latents_are_projected_for_it(form, small_workspace):
    arguments, up = mla.make(jnp.bfloat16)
    expected, expected_lse = mla.expected(arguments, up)
    out, lse = mla.run(arguments, up, "cuda", form=form)
    error = np.linalg.norm(np.float32(out) - expected, axis=-1)
    assert (error <= 2e-2 * np.maximum(np.linalg.norm(expected, axis=-1), 1e-3)).all()
    np.testing.assert_allclose(lse, expected_lse, atol=2e-2)


small_workspace = mla.small_workspace


def lowered(monkeypatch, call, *operands) -> str:
    support.as_if_cuda(monkeypatch)
    return lower_for_gpu(call, *operands).as_text()


def operands_of(case):
    data, key, value, _ = prefix.make_apart(case)
    query, *others = data.arguments()
    return query, jnp.asarray(key), jnp.asarray(value), *others


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (made(head_dim=128), True),
        (made(head_dim=128, cache_dtype="int8", scale_per_head=True), False),
        (made(head_dim=64), False),
        (made(head_dim=128, cache_dtype="float8_e5m2", scale_per_head=True), False),
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_what_a_hopper_gpu_takes_by_itself(monkeypatch, case, taken):
    text = lowered(monkeypatch, pallas_attn.prefix_prefill, *operands_of(case))
    assert ("pallas_attn_attention_forward_sm90" in text) == taken
    # Sequences that are decoded, in a launch of their own.
    assert ("pallas_attn_ragged_attention_short" in text) != taken


def test_what_is_kept_is_written_in_place(monkeypatch):
    """And where all that is left to others is decoded, nothing else is launched."""
    case = made(num_heads=16, num_kv_heads=1, head_dim=128)
    query, *others = operands_of(case)

    def call(out, query, *others):
        return pallas_attn.prefix_prefill(query, *others, out=out, skip_decode=True)

    text = lowered(monkeypatch, call, query, query, *others)
    [custom] = [
        line for line in text.splitlines() if "attention_forward_sm90" in line and "custom_call" in line
    ]
    assert custom.count("output_operand_alias<") == 2
    assert "pallas_attn_ragged_attention_short" not in text


def test_heads_made_of_latents_take_it(monkeypatch):
    arguments, up = mla.make(jnp.bfloat16)
    wide = {name: jnp.zeros((mla.HEADS, 128, 512), jnp.bfloat16) for name in up}
    query = jnp.zeros((len(arguments[0]), mla.HEADS, 192), jnp.bfloat16)
    pool, *others = map(jnp.asarray, arguments[1:])

    def call(query, pool, key_up, value_up, *others):
        return pallas_attn.mla_prefill(
            query, pool, *others, key_up=key_up, value_up=value_up, form="projected"
        )

    text = lowered(monkeypatch, call, query, pool, wide["key_up"], wide["value_up"], *others)
    # New tokens, and a turn's part of the contexts.
    assert text.count("custom_call @pallas_attn_attention_forward_sm90") == 2


def test_an_output_of_bytes_is_refused(monkeypatch):
    case = made(head_dim=128)

    def call(*operands):
        return pallas_attn.prefix_prefill(*operands, out_dtype="float8_e4m3fn", implementation="cuda")

    with pytest.raises(ValueError, match="needs outputs of query's dtype, bfloat16, got float8_e4m3fn"):
        lowered(monkeypatch, call, *operands_of(case))
