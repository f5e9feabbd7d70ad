"""`batch_invariant`: a row has the same bits alone and in any batch, beside any others, in any order, under a table of
any width."""

import dataclasses
import itertools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import COMPILED, ON_GPU

import pallas_attn
from pallas_attn import MLADecodeConfig, PagedAttentionConfig
from pallas_attn.testing import cases

IMPLEMENTATIONS = ["interpret", *ON_GPU]
MINE = 600
BATCHES = {
    "alone": (MINE,),
    "under a wider table": (MINE,),
    "first of seven": (MINE, 5, 0, 1024, 600, 64, 333),
    "last of seven": (77, 1024, 0, 5, 64, 3, MINE),
    "beside one that is long": (3, 5000, MINE),
    "last of seven, one of them long": (77, 5000, 0, 5, 64, 3, MINE),
}
MOST = ("alone", "last of seven, one of them long")
OPTIONS = {
    "plain": {},
    "as the heuristic has it": {"config": ()},
    "several tokens, window": {"q_len": 3, "sliding_window": 500},
    "fp8, block-sparse": {"cache_dtype": "float8_e4m3fn", "block_sparse": pallas_attn.LocalStride(32, 4, 2)},
    "a tree": {"q_len": 4, "tree": "positions"},
    "a tree, sinks": {"q_len": 4, "tree": "positions", "sinks": True},
    "a tree, ALiBi, soft cap": {"q_len": 4, "tree": "positions", "alibi": True, "softcap": 20.0},
    "one token, fp8, ALiBi": {"cache_dtype": "float8_e4m3fn", "alibi": True, "config": ()},
}
# In interpret mode the CPU's compiler rounds a product that is added to once or twice, as the rest of the batch has it.
FUSED = [name for name in OPTIONS if "ALiBi" in name or "sinks" in name]


def rows_of_mine(case, implementation: str, config) -> list[bytes]:
    """Out and lse of the sequence of MINE tokens, whose query, pages and options are the same in every batch."""
    alone = inputs.make(dataclasses.replace(case, seq_lens=(MINE,), spare_pages=3))
    data = inputs.make(case, seed=1)
    seq = case.seq_lens.index(MINE)
    data.query[seq] = alone.query[0]
    if isinstance(alone, inputs.PagedInputs):
        for name, array in alone.extras.items():
            if name in ("tree_mask", "query_positions"):
                data.extras[name][seq] = array[0]
            else:
                data.extras[name] = array
    own, page = (
        inputs.token_places(x.block_tables[i], MINE, case.page_size) for x, i in ((alone, 0), (data, seq))
    )
    pools = ("latent_cache",) if case.op == "mla_decode" else ("key_cache", "value_cache")
    for pool in pools:
        getattr(data, pool)[page] = getattr(alone, pool)[own]
    options = {}
    if case.op == "paged_attention":
        rules = {name: getattr(case, name) for name in ("sliding_window", "block_sparse", "softcap")}
        options = rules | {name: jnp.asarray(array) for name, array in data.extras.items()}
    call = getattr(pallas_attn, case.op)
    out, lse = jax.jit(
        lambda *arrays: call(
            *arrays,
            return_lse=True,
            batch_invariant=True,
            implementation=implementation,
            config=config,
            **options,
        )
    )(*data.arguments())
    assert np.isfinite(np.float32(out[seq])).all()
    return [np.asarray(x[seq]).tobytes() for x in (out, lse)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        *((name, "interpret") for name in OPTIONS if name not in FUSED),
        *(pytest.param(*pair, marks=pytest.mark.gpu) for pair in itertools.product(OPTIONS, COMPILED)),
    ],
)
@pytest.mark.sweep(options=lambda options: [len(OPTIONS[options]) > 1])
def test_paged_attention(options, implementation):
    chosen = dict(OPTIONS[options])
    config = None
    if chosen.pop("config", None) is None:
        config = PagedAttentionConfig(16, 32, split_tokens=64, target_programs=12)
    found = {}
    # A program for each batch: nearly all of them for one kind of call, and for the others what differs most.
    for name in [*BATCHES][:-1] if options == "plain" else MOST:
        spare = 40 if "wider" in name else 3
        case = cases.DecodeCase(BATCHES[name], 4, 2, 64, 16, spare_pages=spare, **chosen)
        found[name] = rows_of_mine(case, implementation, config)
    assert all(rows == found["alone"] for rows in found.values()), [
        n for n in found if found[n] != found["alone"]
    ]


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.slow
def test_mla_decode(implementation):
    config = MLADecodeConfig(16, 32, split_tokens=64, target_programs=6, num_warps=4)
    found = {
        name: rows_of_mine(cases.MLADecodeCase(BATCHES[name], 4), implementation, config) for name in MOST
    }
    assert all(rows == found["alone"] for rows in found.values()), [
        n for n in found if found[n] != found["alone"]
    ]


@pytest.mark.once
def test_without_it_bits_do_depend_on_the_batch():
    """So that the tests above could fail: fair shares of a longer batch are longer."""
    config = PagedAttentionConfig(16, 32, min_split_tokens=32, target_programs=12)
    call = jax.jit(
        lambda *arrays: pallas_attn.paged_attention(*arrays, implementation="interpret", config=config)
    )
    data = inputs.make(cases.DecodeCase((MINE, 5000), 4, 2, 64, 16))
    both = call(*data.arguments())
    first = {name: getattr(data, name)[:1] for name in ("query", "block_tables", "seq_lens")}
    alone = call(*data.copy(**first).arguments())
    assert np.asarray(both[0]).tobytes() != np.asarray(alone[0]).tobytes()
    np.testing.assert_allclose(np.float32(both[0]), np.float32(alone[0]), atol=2e-2)


@pytest.mark.parametrize("op", ["paged_attention", "mla_decode"])
@pytest.mark.parametrize("implementation", ["xla", "cuda"])
def test_what_is_not_invariant_is_refused_by_name(op, implementation):
    if op == "paged_attention" and implementation == "cuda":
        pytest.skip("paged_attention has no such implementation")
    case = cases.DecodeCase((5,), 4, 2, 64, 16) if op == "paged_attention" else cases.MLADecodeCase((5,), 4)
    with pytest.raises(
        ValueError, match=f"{op}: implementation '{implementation}' cannot serve this call: "
    ) as refused:
        getattr(pallas_attn, op)(
            *inputs.make(case).arguments(), batch_invariant=True, implementation=implementation
        )
    if implementation == "xla":
        assert "is not batch_invariant" in str(refused.value)


@pytest.mark.parametrize("op", ["paged_attention", "mla_decode"])
def test_a_config_must_say_how_long_splits_are(op):
    latent = op == "mla_decode"
    case = cases.MLADecodeCase((5,), 4) if latent else cases.DecodeCase((5,), 4, 2, 64, 16)
    config = (MLADecodeConfig if latent else PagedAttentionConfig)(16, 16)
    with pytest.raises(
        ValueError, match=f"^{op}: argument 'config': expected split_tokens above 0 with batch_inv"
    ):
        getattr(pallas_attn, op)(
            *inputs.make(case).arguments(), batch_invariant=True, implementation="interpret", config=config
        )


def test_a_schedule_is_refused():
    data = inputs.make(cases.MLADecodeCase((5,), 4))
    schedule = pallas_attn.mla_schedule(jnp.asarray(data.seq_lens), num_heads=4)
    with pytest.raises(
        ValueError, match=r"^mla_decode: argument 'schedule': expected None with batch_invariant"
    ):
        pallas_attn.mla_decode(
            *data.arguments(), batch_invariant=True, schedule=schedule, implementation="interpret"
        )
