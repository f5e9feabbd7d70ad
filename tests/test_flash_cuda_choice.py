"""Whose gradients are whose: `flash_attention` by CUDA forward, and by CUDA or by tiles backward. No GPU."""

import functools

import hopper_on_cpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from lowering import abstract_mesh, lower_for_gpu
from support import as_if_cuda, unchecked

import pallas_attn
from pallas_attn import FlashAttentionCudaConfig, FlashAttentionTiles, mods

pytestmark = pytest.mark.once
FORWARD, BACKWARD = (f"pallas_attn_attention_{which}_sm90" for which in ("forward", "backward"))
OWN, TILED = FlashAttentionCudaConfig("cuda"), FlashAttentionCudaConfig("tiled")
FORCED = {"implementation": "cuda"}


@pytest.fixture
def built(monkeypatch):
    as_if_cuda(monkeypatch)


def shapes(length: int = 2048, dim: int = 128, dtype="bfloat16") -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((1, length, heads, dim), jnp.dtype(dtype)) for heads in (16, 4, 4)]


def gradients(*floats, **options):
    def loss(*floats):
        out = unchecked(pallas_attn.flash_attention)(*floats, **{"causal": True} | options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2))(*floats)


def chosen(arrays, **options) -> tuple[bool, bool, bool]:
    """Whether the CUDA kernel is forward, backward, and whether the tiled ones are backward."""
    text = lower_for_gpu(functools.partial(gradients, **options), *arrays).as_text()
    return FORWARD in text, BACKWARD in text, "pallas_attn_flash_attention_dkv" in text


@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        ({}, 4096, (True, False, True)),
        (FORCED, 2048, (True, False, True)),
        (FORCED | {"config": FlashAttentionCudaConfig()}, 2048, (True, False, True)),
        (FORCED | {"config": OWN}, 2048, (True, True, False)),
        # What only CUDA takes chooses it, for short calls too.
        ({"config": OWN}, 64, (True, True, False)),
        ({"config": TILED}, 64, (True, False, True)),
    ],
)
def test_gradients_of_few_narrow_heads_are_tiled_unless_the_config_says_cuda(
    built, options, length, expected
):
    assert chosen(shapes(length, dim=64), **options) == expected


def test_gradients_of_enough_keys_are_its_own_unless_the_config_says_tiled(built):
    assert chosen(shapes(16384), **FORCED) == (True, True, False)
    assert chosen(shapes(16384, dim=256)) == (True, True, False)
    assert chosen(shapes(2**17, dim=64)) == (True, True, False)
    assert chosen(shapes(16384), config=TILED) == (True, False, True)


@pytest.mark.parametrize(
    "arrays",
    [shapes(16384 - 128), shapes(2**17 - 128, dim=64), shapes(16384, dim=136), shapes(2**17, dim=96)],
    ids=["few", "few narrow", "between", "narrow"],
)
def test_what_was_not_timed_is_tiled(built, arrays):
    assert chosen(arrays) == (True, False, True)


@pytest.mark.parametrize("options", [{"sliding_window": 4096}, {"cu_q_lens": jnp.array([0, 2**17])}], ids=str)
def test_gradients_of_narrow_heads_that_see_a_part_are_tiled(built, options):
    assert chosen(shapes(2**17, dim=64), **options) == (True, False, True)


def test_gradients_of_a_block_mask_are_tiled(built):
    sizes = dict(q_len=16384, kv_len=16384, max_partial=256)
    mask = pallas_attn.block_mask(mods.prefix_lm(jnp.zeros(1, jnp.int32)), **sizes)
    assert chosen(shapes(16384), causal=False, block_mask=mask)[1:] == (False, True)
    mask = pallas_attn.block_mask(mods.causal(), **sizes)
    assert chosen(shapes(16384), causal=False, block_mask=mask) == (True, True, False)  # as without one


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        (shapes(), {"implementation": "pallas", "config": OWN}, ValueError,
         "'pallas' cannot serve this call: takes no FlashAttentionCudaConfig"),
        (shapes(), {"implementation": "xla", "config": OWN}, ValueError,
         "'xla' cannot serve this call: takes no FlashAttentionCudaConfig"),
        (shapes(dtype="float32"), {"config": OWN}, ValueError, "no implementation can serve this call: cuda: needs bf"),
        (shapes(), FORCED | {"config": FlashAttentionTiles(64, 64)}, ValueError,
         "'cuda' cannot serve this call: takes a FlashAttentionCudaConfig, got a FlashAttentionTiles"),
    ],
    ids=["pallas", "xla", "float32", "tiles"],
)  # fmt: skip
def test_refusals(built, arrays, options, error, message):
    with pytest.raises(error, match=message):
        chosen(arrays, **options)


CASES = {
    "causal": {"causal": True},
    "heads first": {"layout": "BNTH", "causal": True, "q_offset": -7},
    "window": {"sliding_window": (30, 9), "softcap": 3.0},
    "documents": {"causal": True, "segment_ids": jnp.asarray(np.arange(90)[None] // 35 % 2, jnp.int32).repeat(2, 0)},
    "ALiBi": {"causal": True, "score_mod": lambda s, b, h, q, k: s - (h + 1) / 9.0 * (q - k)},
    "ALiBi in a window": {
        "sliding_window": (40, 0), "q_offset": 5, "score_mod": lambda s, b, h, q, k: s - (h + 1) / 9.0 * (q + 5 - k),
    },
    "block mask": {"block_mask": lambda b, h, q, k: (k <= q) & (q - k < 90 * (3 * h + 1)) & (q % 5 > b)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(case=lambda case: CASES[case])
def test_what_the_kernel_is_handed_makes_the_gradients(monkeypatch, case):
    """Of a sink and of the log-sum-exp, too."""
    hopper_on_cpu.stand_in(monkeypatch)
    options, rng, tokens = dict(CASES[case]), np.random.default_rng(0), 90
    if mask := options.get("block_mask"):
        tokens = 300
        options["block_mask"] = pallas_attn.block_mask(
            mask, q_len=tokens, kv_len=tokens, batch=2, num_heads=4, max_partial=64
        )
    by_head = options.get("layout") == "BNTH"
    floats = [
        jnp.asarray(rng.standard_normal((2, n, tokens, 32) if by_head else (2, tokens, n, 32)), jnp.bfloat16)
        for n in (4, 2, 2)
    ]
    floats.append(jnp.asarray(rng.standard_normal(4), jnp.float32))

    def pulled(implementation, config, *floats):
        def attention(query, key, value, sinks):
            return pallas_attn.flash_attention(
                query, key, value, sinks=sinks, return_lse=True, implementation=implementation, config=config,
                **options,
            )  # fmt: skip

        results, pull = jax.vjp(attention, *floats)
        # Of few numbers, which bf16 has too.
        return pull(
            tuple(jnp.cos(jnp.arange(r.size) % 97.0).reshape(r.shape).astype(r.dtype) for r in results)
        )

    found = jax.jit(functools.partial(pulled, "cuda", OWN))(*floats)
    right = jax.jit(functools.partial(pulled, "xla", None))(*(x.astype(jnp.float32) for x in floats))
    for x, y in zip(found, right, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(y) > 0.1
        assert np.linalg.norm(x - y) < 8e-3 * np.linalg.norm(y)


@pytest.mark.parametrize("config", [TILED, OWN], ids=["tiled", "own"])
@pytest.mark.parametrize(("name", "runs"), [("attention", 1), ("other", 2)])
def test_under_a_policy_that_knows_its_name_the_forward_kernel_runs_once(built, config, name, runs):
    """In a scan over layers, whose body runs it, and whose body of gradients does not."""
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def loss(x):
        def layer(x, _):
            out = pallas_attn.flash_attention(
                x, x[:, :, :4], x[:, :, 4:8], causal=True, residual_checkpoint_name=name, config=config,
                implementation="cuda",
            )  # fmt: skip
            return x + jnp.sin(out), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=3)[0].astype(jnp.float32))

    text = lower_for_gpu(jax.grad(loss), shapes()[0]).as_text()
    assert text.count(f"@{FORWARD}(") == runs
    assert text.count(f"@{BACKWARD}(") == (config is OWN)


def test_vmap_runs_both_for_each(built):
    several = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes()]
    function = jax.vmap(functools.partial(gradients, config=OWN), in_axes=(0, None, 0))
    text = lower_for_gpu(function, several[0], shapes()[1], several[2]).as_text()
    assert text.count("stablehlo.while") >= 2
    for target in (FORWARD, BACKWARD):
        [call] = [line for line in text.splitlines() if f"@{target}(" in line]
        assert "tensor<1x2048x16x128xbf16>" in call


def test_gradients_are_exported_where_both_calls_are_vouched_for(built):
    call = jax.jit(functools.partial(gradients, config=OWN))
    known = [export.DisabledSafetyCheck.custom_call(target) for target in (FORWARD, BACKWARD)]
    with abstract_mesh():
        with pytest.raises(ValueError, match=BACKWARD):
            export.export(call, platforms=["cuda"], disabled_checks=known[:1])(*shapes())
        exported = export.export(call, platforms=["cuda"], disabled_checks=known)(*shapes())
    again = export.deserialize(exported.serialize())
    assert FORWARD in again.mlir_module()
    assert BACKWARD in again.mlir_module()
    assert [x.shape for x in again.out_avals] == [x.shape for x in shapes()]
