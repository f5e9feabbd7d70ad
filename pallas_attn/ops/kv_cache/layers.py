"""What caches of a whole model have in common: every layer has pages of its own in their pools, by the same tables."""

import abc
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._types import BlockTables
from pallas_attn.ops.kv_cache.addressing import check_layer, every_layer, layer_tables, token_slots
from pallas_attn.ops.kv_cache.copying import PageIds, copied_pages, copy_rows


class Layers(abc.ABC):
    """The base of such caches, which are frozen dataclasses and pytrees with fields of these names."""

    shared_tables: BlockTables | Any
    num_layers: int
    num_pages: int
    page_size: int

    @property
    def block_tables(self) -> BlockTables:
        """Of a cache of one layer, `shared_tables`. Refused for several: ops expect one layer's pages by that name, and
        these would read layer 0's."""
        if self.num_layers > 1:
            raise AttributeError(
                f"{type(self).__name__}: attribute 'block_tables': expected a cache of one layer, got "
                f"{self.num_layers} layers: ops want layer_tables(layer); what all layers share is shared_tables"
            )
        return self.shared_tables

    def layer_tables(self, layer: int | jax.Array) -> BlockTables:
        """The block tables [num_seqs, max_pages] as ops want them for one layer.

        Ids outside [0, num_pages), and all those of a traced layer out of range, become -1.
        """
        return self._tables_of(check_layer(self._checker("layer_tables"), layer, self.num_layers))

    def copy_pages[Cache: Any](self: Cache, source_pages: PageIds, target_pages: PageIds) -> Cache:
        """Copies pages [num_copies], ids in [0, num_pages), onto others, in every layer, and with them scales that are
        theirs alone; see `copy_pages`."""
        pages = copied_pages(self._checker("copy_pages"), source_pages, target_pages)
        places = every_layer(*pages, self.num_pages, self.num_layers)
        return self.replace(**{name: copy_rows(getattr(self, name), *places) for name in self._by_page()})

    def replace[Cache: Any](self: Cache, **changes: Any) -> Cache:
        """The cache with other fields; they are not checked, since a transformation may put anything there."""
        if "block_tables" in changes:
            changes["shared_tables"] = changes.pop("block_tables")
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        for name in changes:  # which dataclasses would report in its own words
            self._checker("replace").one_of(name, name, fields)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @abc.abstractmethod
    def _by_page(self) -> Sequence[str]:
        """The fields whose first dimension is all layers' pages."""

    def _checker(self, method: str) -> ArgumentChecker:
        return ArgumentChecker(f"{type(self).__name__}.{method}")

    def _tables_of(self, layer: int | jax.Array) -> BlockTables:
        return layer_tables(self.shared_tables, self.num_pages, layer)

    def _slots(self, check: ArgumentChecker, layer: int | jax.Array, positions: jax.Array) -> jax.Array:
        """[num_seqs * n] slots of new tokens in one layer's pages."""
        layer = check_layer(check, layer, self.num_layers)
        check.bind("cache", num_seqs=self.shared_tables.shape[0])
        check.array("positions", positions, ("num_seqs", "n"), [jnp.int32])
        return token_slots(self._tables_of(layer), self.page_size, jnp.asarray(positions))


def exportable(cache_type: type) -> None:
    """Lets a cache be an argument of an exported function: its static fields travel as JSON."""
    export.register_pytree_node_serialization(
        cache_type,
        serialized_name=f"pallas_attn.{cache_type.__name__}",
        serialize_auxdata=lambda static: json.dumps(list(static)).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
    )
