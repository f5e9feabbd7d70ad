"""An op as a record, and the one path that its calls take: resolve, refuse, partition, choose tiles, run.

A public function checks its arguments, puts them into the op's operands (operands.py) and calls `Op.serve`. Everything
after that, and `tune` too, knows an op only by its record.
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
    """Everything that distinguishes one op from another.

    name: of the public function, in messages, in measured files and to `available_implementations`.
    implementations: each has `fn(operands)`, or `fn(operands, config=)` where it takes one, which returns the results.
    results: their dimensions in words, or a function of the operands that returns them.
    config: the class of tile sizes; None (and neither key nor heuristic) where no implementation takes one.
    key: the facts of a call by which measured files are searched; None for calls that are never measured.
    heuristic: (operands, **measured) -> config; `measured` are fields that a measurement has already fixed.
    check_config: raises for a caller's config that cannot serve.
    share: how a device serves its part of sharded operands, if that differs from serving a whole call.
    settle: the operands as served once tiles were chosen rather than given.
    kernels: for an op of several kernels with measured entries of their own (told apart by the fact "kernel" in the
        key): the config's fields that belong to each.
    derivative: (call, operands) -> results, of an op with its own gradient rule, which runs both directions by
        `call.run`.
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
        """The results: of the whole call or, where operands are sharded, each device's part."""
        given = config is not None
        name = dispatch.resolve(self.name, operands, implementation, named(operands), config=config)[0]
        chosen = self.implementations[name]
        if given and not (chosen.takes_config or chosen.own_config):
            fail(self.name, "config", f"None for implementation {name!r}", "a config")
        operands = chosen.prepare(operands)
        if given:
            configs.check_type(self.name, cast(type[Any], chosen.own_config or self.config), config)
            check = chosen.check_config if chosen.own_config else self.check_config
            check(operands, config)
        call = Call(self, name, config)
        return call.run(operands) if self.derivative is None else self.derivative(call, operands)

    def tiles(self, operands: O, explicit: C | None = None) -> C:
        """The config for these operands: the caller's, a measured one, or the heuristic's."""
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
        """Runs the implementation on the operands or, where these are sharded, on each device's part. `step` names one
        of the implementation's other functions; `results` are its dimensions where they differ from the op's, `summed`
        is as in `partition.run`, and `static` is passed to the function."""
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
