"""An op as a record: what its operands say of themselves, and the way that every call goes."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import unchecked

from pallas_attn._call import configs, dispatch, op
from pallas_attn._call.device import Device
from pallas_attn._call.operands import aliases, dims, dims_of, named, only, operands, ready
from pallas_attn.ops.paged_attention.api import OP as PAGED


@operands
class Operands:
    query: Any = dims("seqs dim")
    pools: Any = dims(("pages slot", "pages"))
    scale: Any = dims("heads", "pages heads", default=None)
    cache: Any = dims(lambda self: f"pages {self.order}", default=None)
    order: str


ONE = Operands(query=jnp.ones((2, 3)), pools=(jnp.ones((4, 5)), jnp.ones(4)), order="slot heads")


def test_each_array_says_what_its_dimensions_are():
    more = dataclasses.replace(ONE, scale=jnp.ones((4, 2)), cache=jnp.ones((4, 5, 2)))
    said = [("query", "seqs dim"), ("pools", "pages slot"), ("pools", "pages")]
    assert list(dims_of(ONE)) == said
    assert list(dims_of(more)) == [*said, ("scale", "pages heads"), ("cache", "pages slot heads")]
    assert dict(dims_of(dataclasses.replace(ONE, scale=jnp.ones(2))))["scale"] == "heads"
    for one in (ONE, more):
        for (_, words), array in zip(dims_of(one), jax.tree.leaves(one), strict=True):
            assert len(words.split()) == array.ndim
    assert list(named(ONE)) == ["query", "pools"]


def test_what_is_compiled_in_is_no_leaf():
    seen: list[Any] = []
    jax.eval_shape(seen.append, ONE)
    assert isinstance(seen[0], Operands)
    assert seen[0].order == "slot heads"
    assert seen[0].scale is None
    assert jax.tree.structure(ONE) == jax.tree.structure(ready(ONE))
    assert jax.tree.structure(ONE) != jax.tree.structure(dataclasses.replace(ONE, order="heads slot"))


@dataclasses.dataclass(frozen=True)
class Tiles:
    block: int = 16


@dataclasses.dataclass(frozen=True)
class Two:
    block: int = 16
    other: int = 16


def doubled(given: Operands, config: Tiles | None = None) -> tuple[jax.Array]:
    return (given.query * (2 if config is None else config.block),)


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(dispatch, "_OPS", {})
    made = op.Op(
        name="double",
        implementations={
            "interpret": dispatch.Implementation(doubled),
            "xla": dispatch.Implementation(doubled, takes_config=False),
        },
        results=("seqs dim",),
        config=Tiles,
        key=lambda given: {"seqs": given.query.shape[0]},
        heuristic=lambda given, **measured: Tiles(**measured),
        check_config=lambda given, config: configs.check_sizes(config, {"block": 16}),
        settle=lambda given, config: dataclasses.replace(given, query=given.query + 1),
    )
    return functools.partial(made.serve, ONE)


def test_tiles_are_the_callers_or_chosen(serve):
    (chosen,), (given,), (plain,) = (
        serve(implementation=name, config=config)
        for name, config in (("interpret", None), ("interpret", Tiles(32)), ("xla", None))
    )
    assert [chosen[0, 0], given[0, 0], plain[0, 0]] == [2 * 16, 32, 2]


@pytest.mark.parametrize(
    ("name", "config", "error", "message"),
    [
        ("xla", Tiles(), ValueError, "double: argument 'config': expected None for implementation 'xla', got a c"),
        ("interpret", 3, TypeError, "double: argument 'config': expected Tiles, got int"),
        ("interpret", Tiles(8), ValueError, "Tiles: argument 'block': expected a power of two >= 16, got 8"),
        ("best", None, ValueError, "double: argument 'implementation': expected None or one of 'xla', 'interpret'"),
    ],
)  # fmt: skip
def test_refusals(serve, name, config, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        serve(implementation=name, config=config)


def test_implementations_have_what_the_record_says():
    assert dispatch.available_implementations()["paged_attention"].keys() == PAGED.implementations.keys()


def test_whoever_is_served_slowly_is_told_at_the_line_of_the_call(monkeypatch):
    monkeypatch.setattr(dispatch, "_OPS", {})
    monkeypatch.setattr(dispatch, "resolve", unchecked(dispatch.resolve))
    monkeypatch.setattr(dispatch, "current_device", lambda: Device("gpu", "one", 132, 90))
    slow = dispatch.Implementation(doubled, takes_config=False)
    odd = dispatch.Implementation(doubled, lambda given: "it is odd")
    made = op.Op(name="double", implementations={"pallas": odd, "xla": slow}, results=("seqs dim",))
    with pytest.warns(UserWarning, match="slow 'xla' implementation because pallas: it is odd") as told:
        unchecked(op.Op.serve)(made, ONE, implementation=None)
    assert told[0].filename == __file__


def test_some_arrays_alone_and_which_results_are_written_over_them():
    more = dataclasses.replace(ONE, scale=jnp.ones(2), cache=jnp.ones((4, 5, 2)))
    assert list(named(only(more, "query", "cache"))) == ["query", "cache"]
    assert only(more, "query").order == more.order
    # Leaves: query, two of pools, scale, cache.
    assert aliases(more, "cache", "scale") == {4: 0, 3: 1}
    assert aliases(ONE, "cache", "query") == {0: 1}


def test_gradients_are_steps_of_the_implementation_and_kernels_have_entries_of_their_own(monkeypatch):
    monkeypatch.setattr(dispatch, "_OPS", {})
    asked = []

    def resolve(name, kind, explicit, key, heuristic):
        asked.append(key)
        return heuristic(**({"block": 64} if key["kernel"] == "back" else {"other": 64}))

    monkeypatch.setattr(configs, "resolve", resolve)
    tripled = dispatch.Implementation(lambda given, config, by: (given.query * config.block * by,))
    made = op.Op(
        name="double",
        implementations={
            "interpret": dispatch.Implementation(
                doubled,
                prepare=lambda given: dataclasses.replace(given, query=given.query + 1),
                steps={"back": tripled},
            )
        },
        results=lambda given: ("seqs dim",),
        config=Two,
        key=lambda given: {},
        heuristic=lambda given, **measured: Two(**measured),
        kernels={"forth": ("other",), "back": ("block",)},
        derivative=lambda call, given: call.run(given, step="back", by=3),
    )
    (found,) = made.serve(ONE, implementation="interpret")
    assert found[0, 0] == 2 * 64 * 3
    assert asked == [{"kernel": "forth"}, {"kernel": "back"}]
    assert made.tiles(ONE) == Two(64, 64)
