"""Every argument of every public function and method, given every kind of wrong thing, is refused in one line that
names function, argument, what was expected and what was given: concrete, and where it can be traced, inside jit."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import refusals as kinds
from refused_calls import calls
from refused_sparse_calls import sparse_calls

import pallas_attn
from pallas_attn import nn


@pytest.fixture(autouse=True)
def without_jaxtyping():
    """As users have it, without the shape checks that jaxtyping adds in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


CALLS = calls() | sparse_calls()
ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call.kinds]


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    """Else a refusal below could be one of something else."""
    call = CALLS[name]

    def run() -> None:
        call.function(**{needed: 0 for needed in call.kinds if needed == "layer"} | call.arguments)

    # The first three have no argument but the wrong one; flax makes parameters outside of other traces only.
    if name not in (
        *(
            "PagedKVCache.replace",
            "PagedLatentCache.replace",
            "alibi_slopes",
            "MultiHeadLatentAttention",
            "Indexer",
        ),
    ):
        jax.eval_shape(run)


@pytest.mark.once
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda x: x)
def test_wrong_arguments_are_refused(name, argument):
    call = CALLS[name]
    function = name.split(",")[0]
    rest = {n: v for n, v in call.arguments.items() if n != argument}

    def concrete(**given):
        return call.function(**rest, **given)

    def traced(**given):
        return jax.eval_shape(lambda value: call.function(**rest, **{argument: value}), given[argument])

    wrong = call.kinds[argument].wrong(call.arguments.get(argument))
    failures = [kinds.is_refused(concrete, function, argument, value) for value in wrong]
    if call.kinds[argument].arrays(call.arguments.get(argument, jnp.zeros(1))) and argument in call.arguments:
        arrays = [x for x in wrong if isinstance(x, jax.Array) and x.shape]
        failures += [kinds.is_refused(traced, function, argument, value) for value in arrays]
    assert not any(failures), "\n".join(filter(None, failures))


def test_every_public_name_has_a_row():
    """What takes no arguments, or is no function, has none to refuse."""
    without = {"MLASchedule", "OutOfPagesError", "available_implementations", "record_implementations"}
    without |= {"register_ffi_targets", "PageAllocator", "compat"}
    without |= {"SparseLayout", "BlockMask"}  # pytrees, checked where they are used
    without |= {"mods", "and_masks", "or_masks"}  # a module; functions without names of arguments
    tested = {name.split(",")[0].split(".")[0] for name in CALLS}
    assert {*pallas_attn.__all__, *nn.__all__} - without <= tested
    for cache in (pallas_attn.PagedKVCache, pallas_attn.PagedLatentCache):
        fields = {field.name for field in dataclasses.fields(cache)}
        methods = {n for n in vars(cache) if not n.startswith("_") and callable(getattr(cache, n))} - fields
        assert {f"{cache.__name__}.{method}" for method in methods} <= {name.split(",")[0] for name in CALLS}
