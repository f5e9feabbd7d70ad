"""An op as a record, and the one way that its calls go: resolve, refuse, partition, choose tiles, run.

What a public function checks it puts into the op's operands (operands.py), and hands these to `Op.serve`. Everything
behind that, `tune` too, sees an op by its record alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_attn._call import configs, dispatch, partition
from pallas_attn._call.checks import fail
from pallas_attn._call.operands import named


def _nothing(operands: Any, config: Any) -> None:
    pass


def _same(operands: Any, *_: Any) -> Any:
    return operands


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op[O, C]:
    """All that tells one op from another.

    name: of the public function, in messages, in measured files and to `available_implementations`.
    implementations: each `fn(operands)`, or, where it takes one, `fn(operands, config=)`, gives the results.
    results: what their dimensions are, in words.
    config: the class of tile sizes.
    key: the facts of a call that measured files go by; None for calls that none is for.
    heuristic: (operands, **measured) -> config; `measured` are fields that are known better.
    check_config: refuses a config of the caller's.
    share: what a device serves of operands that are sharded, if that is not just their parts.
    settle: what is served in tiles that were chosen, not given.
    """

    name: str
    implementations: Mapping[str, dispatch.Implementation]
    results: tuple[str, ...]
    config: type[C]
    key: Callable[[O], dict[str, Any] | None]
    heuristic: Callable[..., C]
    check_config: Callable[[O, C], None] = _nothing
    share: Callable[[O], O] = _same
    settle: Callable[[O, C], O] = _same

    def __post_init__(self):
        dispatch.register(self.name, dict(self.implementations))

    def serve(self, operands: O, *, implementation: str | None, config: Any) -> tuple[jax.Array, ...]:
        """The results, of the whole call or, where operands are sharded, on each device of its part."""
        given = config is not None
        name = dispatch.resolve(self.name, operands, implementation, named(operands), configured=given)[0]
        if given and not self.implementations[name].takes_config:
            fail(self.name, "config", f"None for implementation {name!r}", "a config")
        configs.check_type(self.name, self.config, config)
        if given:
            self.check_config(operands, config)
        return partition.run(
            self.name,
            self._attend,
            operands,
            self.results,
            static={"implementation": name, "config": config},
            share=self._attend_share,
            implementation=name,
        )

    def _attend(self, operands: O, *, implementation: str, config: C | None) -> tuple[jax.Array, ...]:
        chosen = self.implementations[implementation]
        if not chosen.takes_config:
            return chosen.fn(operands)
        tiles = self.tiles(operands, config)
        return chosen.fn(self.settle(operands, tiles) if config is None else operands, config=tiles)

    def _attend_share(self, operands: O, **static: Any) -> tuple[jax.Array, ...]:
        return self._attend(self.share(operands), **static)

    def tiles(self, operands: O, explicit: C | None = None) -> C:
        """What the operands at hand are cut up by: the caller's config, a measured one, or the heuristic's."""
        guess = functools.partial(self.heuristic, operands)
        return configs.resolve(self.name, self.config, explicit, self.key(operands), guess)
