"""An op as a record, and the one way that its calls go: resolve, refuse, partition, choose tiles, run.

What a public function checks it puts into the op's operands (operands.py), and hands these to `Op.serve`. Everything
behind that, `tune` too, sees an op by its record alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax

from pallas_attn._call import configs, dispatch, partition
from pallas_attn._call.checks import fail
from pallas_attn._call.operands import named


def _nothing(operands: Any, *_: Any, **measured: Any) -> Any:
    pass


def _same(operands: Any, *_: Any) -> Any:
    return operands


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op[O, C]:
    """All that tells one op from another.

    name: of the public function, in messages, in measured files and to `available_implementations`.
    implementations: each `fn(operands)`, or, where it takes one, `fn(operands, config=)`, gives the results.
    results: what their dimensions are, in words, or a function of the operands that says it.
    config: the class of tile sizes; None, and then neither key nor heuristic, where no implementation takes one.
    key: the facts of a call that measured files go by; None for calls that none is for.
    heuristic: (operands, **measured) -> config; `measured` are fields that are known better.
    check_config: refuses a config of the caller's.
    share: what a device serves of operands that are sharded, if that is not just their parts.
    settle: what is served in tiles that were chosen, not given.
    kernels: where there are several, which have measured entries of their own (by the fact "kernel" beside the key):
        the fields of the config that are each one's.
    derivative: (call, operands) -> results, of an op with gradients of its own: what is left of the way is `call.run`,
        forward and for gradients.
    """

    name: str
    implementations: Mapping[str, dispatch.Implementation]
    results: tuple[str, ...] | Callable[[O], tuple[str, ...]] = ()
    config: type[C] | None = None
    key: Callable[[O], dict[str, Any] | None] = _nothing
    heuristic: Callable[..., C] = _nothing
    check_config: Callable[[O, C], None] = _nothing
    share: Callable[[O], O] = _same
    settle: Callable[[O, C], O] = _same
    kernels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    derivative: Callable[["Call[O, C]", O], tuple[jax.Array, ...]] | None = None

    def __post_init__(self):
        dispatch.register(self.name, dict(self.implementations))

    def serve(self, operands: O, *, implementation: str | None, config: Any = None) -> tuple[jax.Array, ...]:
        """The results, of the whole call or, where operands are sharded, on each device of its part."""
        given = config is not None
        name = dispatch.resolve(self.name, operands, implementation, named(operands), config=config)[0]
        chosen = self.implementations[name]
        if given and not (chosen.takes_config or chosen.own_config):
            fail(self.name, "config", f"None for implementation {name!r}", "a config")
        operands = chosen.prepare(operands)
        if given:
            configs.check_type(self.name, cast(type[Any], chosen.own_config or self.config), config)
            self.check_config(operands, config)
        call = Call(self, name, config)
        return call.run(operands) if self.derivative is None else self.derivative(call, operands)

    def tiles(self, operands: O, explicit: C | None = None) -> C:
        """What the operands at hand are cut up by: the caller's config, a measured one, or the heuristic's."""
        assert self.config is not None
        key, guess = self.key(operands), functools.partial(self.heuristic, operands)
        resolve = functools.partial(configs.resolve, self.name, self.config, explicit)
        if key is None or not self.kernels:
            return resolve(key, guess)
        found = {kernel: resolve(key | {"kernel": kernel}, guess) for kernel in self.kernels}
        own = {name: getattr(found[kernel], name) for kernel, names in self.kernels.items() for name in names}
        return dataclasses.replace(next(iter(found.values())), **own)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class Call[O, C]:
    """A call whose implementation is chosen; `config` is the caller's, of the op's class or the implementation's."""

    op: Op[O, C]
    implementation: str
    config: Any

    def run(
        self,
        operands: O,
        *,
        results: tuple[str, ...] | None = None,
        step: str | None = None,
        summed: tuple[str, ...] | None = None,
        **static: Any,
    ) -> tuple[jax.Array, ...]:
        """What the implementation makes of the operands or, where these are sharded, each device of its part. A `step`
        is one of the implementation's others; `results` are those dimensions that differ from the op's, `summed` is as
        in `partition.run`, and `static` goes to the function as it is."""
        said = self.op.results(operands) if callable(self.op.results) else self.op.results
        return partition.run(
            self.op.name,
            self._attend,
            operands,
            said if results is None else results,
            static={"step": step, **static},
            share=self._attend_share,
            summed=summed,
            implementation=self.implementation,
        )

    def _attend(self, operands: O, *, step: str | None, **static: Any) -> tuple[jax.Array, ...]:
        chosen = self.op.implementations[self.implementation]
        chosen = chosen if step is None else chosen.steps[step]
        if not chosen.takes_config:
            return chosen.fn(operands, **static)
        # Steps of an implementation that has a config of its own may have tiles like others'.
        given = None if self.op.implementations[self.implementation].own_config else self.config
        tiles = self.op.tiles(operands, given)
        operands = self.op.settle(operands, tiles) if given is None else operands
        return chosen.fn(operands, config=tiles, **static)

    def _attend_share(self, operands: O, **static: Any) -> tuple[jax.Array, ...]:
        return self._attend(self.op.share(operands), **static)
