"""What `available_implementations` says yes to serves: on an H100 with everything installed, a usual call of an op."""

import functools

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn._call import dispatch
from pallas_attn.ops.blocksparse_attention import builders


def tokens(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def ints(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


POOLS = 2 * [tokens(9, 64, 2, 128)]
LATENTS = tokens(9, 64, 1, 576)
BATCH = (ints(2, 4), ints(2))
NEW = 2 * [tokens(256, 2, 128)]


LAYOUT = builders.sliding_window(256, 512, block_size=128)

CALLS = {
    op: functools.partial(getattr(pallas_attn, op), *arguments, **options)
    for op, arguments, options in [
        ("flash_attention", 3 * [tokens(1, 64, 4, 128)], {}),
        ("paged_attention", [tokens(2, 4, 128), *POOLS, *BATCH], {}),
        ("ragged_paged_attention", [tokens(256, 4, 128), *POOLS, *BATCH, ints(3)], {}),
        ("prefix_prefill", [tokens(256, 4, 128), *NEW, *POOLS, *BATCH, ints(3)], {}),
        ("mla_decode", [tokens(2, 1, 128, 576), LATENTS, *BATCH], {}),
        (
            "mla_prefill",
            [tokens(256, 4, 192), LATENTS, *BATCH, ints(3)],
            dict(form="projected", key_up=tokens(4, 128, 512), value_up=tokens(4, 128, 512)),
        ),
        ("sparse_mla_decode", [tokens(2, 1, 128, 576), LATENTS, ints(2, 1, 64)], {}),
        ("sparse_mla_prefill", [tokens(256, 128, 576), tokens(512, 1, 576), ints(256, 1, 64)], {}),
        ("blocksparse_attention", [tokens(256, 4, 128), *NEW, LAYOUT], dict(cu_k_lens=ints(3))),
        ("write_kv", [*NEW, *POOLS, ints(256)], {}),
        ("write_latents", [tokens(256, 576), LATENTS, ints(256)], {}),
    ]
}


class Served(Exception):
    pass


@pytest.fixture
def _h100(monkeypatch: pytest.MonkeyPatch):
    for name in dispatch.installed:
        monkeypatch.setitem(dispatch.installed, name, lambda: None)
    resolve = dispatch.resolve

    def resolved(*arguments, **more):  # who serves is known: the kernel itself is not wanted
        raise Served(resolve(*arguments, **more)[0])

    monkeypatch.setattr(dispatch, "resolve", resolved)
    with lowering.abstract_mesh():
        yield


def test_every_op_has_a_call():
    assert set(CALLS) == set(pallas_attn.available_implementations())


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize("op", CALLS)
def test_what_is_said_to_be_available_serves(op):
    available = pallas_attn.available_implementations()[op]
    assert not any(available.values())
    for name in (*available, None):
        with pytest.raises(Served, match=name or "cuda|pallas"):
            jax.eval_shape(functools.partial(CALLS[op], implementation=name))
