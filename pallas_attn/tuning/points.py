"""Timing the configs of one kind of call, each checked against the reference before its time counts; for any op."""

import abc
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.op import Op
from pallas_attn.testing.cases import Case
from pallas_attn.tuning import timing
from pallas_attn.tuning.errors import LARGEST_ERROR, worst_error

REPEATS = 3  # enough to rank configs
# A config slower than the fastest by this factor is timed only once.
CLOSE = 1.05
# Retries of samples that are not positive, as disturbed measurements may be.
TRIES = 3
BYTES_PER_SECOND = 2.5e12  # a rough estimate, to size bursts

# Facts that entries have ranges of.
RANGES = ("rows", "streams", "max_len")

type Fields = dict[str, int]
"""Fields of a config that differ from the heuristic's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point(abc.ABC):
    """One kind of call of an op, with all sequences as long as the block table allows. An op's subclass says how it is
    called; registry.py lists them."""

    op: ClassVar[Op]
    sizes: ClassVar[Mapping[str, Any]]
    """Further sizes that the command line may set, with defaults."""

    case: Case

    @classmethod
    @abc.abstractmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[Point]":
        """The points to tune for these sizes."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """A word or two that tell this point from others of its size."""

    @property
    def usual_seconds(self) -> float:
        """Rough time of a call, in seconds."""
        return self.read_bytes / BYTES_PER_SECOND

    @property
    def error_limit(self) -> float:
        return LARGEST_ERROR[self.case.dtype]

    @property
    @abc.abstractmethod
    def read_bytes(self) -> int:
        """Bytes of the caches that one call reads."""

    def abstract(self) -> Any:
        """The op's operands in the point's call, as shapes."""
        raise NotImplementedError

    def struct(self, shape: Sequence[int], dtype: Any = "int32") -> Any:
        """One of their arrays, as a shape."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def key(self) -> dict[str, Any]:
        """The facts of this point in an entry's key, without ranges."""
        return {
            name: fact for name, fact in (self.op.key(self.abstract()) or {}).items() if name not in RANGES
        }

    @property
    def part(self) -> str | None:
        """The field of a config that this point measures, where it is not the whole config."""
        return None

    def config(self, **fields: Any) -> Any:
        """The config of a call for which `fields`, of the point's part, were measured."""
        return self.op.heuristic(self.abstract(), **({self.part: fields} if fields and self.part else fields))

    def tiles(self, fields: Fields) -> Any:
        """The part of the config that this point measures."""
        config = self.config(**fields)
        return config if self.part is None else getattr(config, self.part)

    def chosen(self, fields: Fields) -> dict[str, Any]:
        """The fields of the fastest config that an entry keeps: all that do not follow from the call."""
        tiles = dataclasses.asdict(self.tiles(fields))
        kept = {name: tiles[name] for name in tiles if name not in ("num_splits", "split_tokens")}
        return kept if self.part is None else {self.part: kept}

    def fields_of(self, config: dict[str, Any]) -> Fields:
        """The fields of an entry's config that apply here."""
        return config if self.part is None else config.get(self.part, {})

    @abc.abstractmethod
    def candidates(self) -> list[Fields]:
        """Fields worth trying, the heuristic's (none) first."""

    @abc.abstractmethod
    def inputs(self) -> "Inputs":
        """Inputs for timed calls."""

    @abc.abstractmethod
    def call(self, operands: Any, table: Any, seq_lens: Any, **options: Any) -> Any:
        """The op's (out, lse); `options` are its implementation and config."""

    @property
    def max_len(self) -> int:
        return max(self.case.seq_lens)

    @property
    def streams(self) -> int:
        """Walks over a cache: one for each sequence and KV head."""
        return self.case.num_seqs * self.case.num_kv_heads

    def distinct(self, found: Iterable[Fields]) -> list[Fields]:
        """The heuristic's, and of these what gives another config than earlier ones."""
        configs: dict[Any, Fields] = {}
        for fields in ({}, *found):
            configs.setdefault(self.config(**fields), fields)
        return list(configs.values())


def named(names: Sequence[str], tiles: Iterable[Sequence[int]]) -> list[Fields]:
    """Fields of these names, from tiles."""
    return [dict(zip(names, tile, strict=True)) for tile in tiles]


class Inputs(NamedTuple):
    """The inputs that a point's calls are timed with."""

    operands: Any
    tables: tuple[Any, ...]
    """What differs from call to call in a round: a block table, with disjoint pages if there are few."""
    seq_lens: jax.Array | None
    """None if calls take no lengths."""


class Timing(NamedTuple):
    """Outcome of a config. `problem` says why its time does not count."""

    fields: Fields
    microseconds: float
    error: float
    problem: str | None


def measure(point: Point, choices: Sequence[Fields], implementation: str = "pallas") -> Iterator[Timing]:
    """The timing of each choice of fields, in the order of `choices`. All are compiled before any is timed, since
    compiling disturbs a measurement, and all are timed once before some are timed again."""
    try:
        inputs = point.inputs()
    except MemoryError as error:  # numpy's; jax raises a RuntimeError of many lines
        problem = f"{type(error).__name__}: {_brief(error)}"
        yield from (Timing(fields, math.inf, math.nan, problem) for fields in choices)
        return
    calls_a_round = len(inputs.tables)
    rounds, plain = timing.num_rounds(point.usual_seconds, calls_a_round), False
    if implementation == "interpret":  # only to try this out: slow, and plain jnp to the compiler
        rounds, plain = 1, True

    def loop(config: Any, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        def call(table, seq_lens):
            options = dict(implementation=implementation, config=config)
            return point.call(inputs.operands, table, seq_lens, **options)

        return timing.looped(call, rounds, inputs.tables, inputs.seq_lens, plain=plain)

    def build(fields: Fields) -> Any:
        return jax.jit(functools.partial(loop, point.config(**fields))).lower(inputs).compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = [pool.submit(build, fields) for fields in choices]
        expected = _reference(point, inputs)
    found: list[_Contender | Timing] = []
    warm = plain
    for fields, built in zip(choices, builds, strict=True):
        try:
            run = functools.partial(built.result(), inputs)
            outs = run()
            if not warm:
                timing.warm_up(run)
                warm = True
            error = max(worst_error(*pair) for pair in zip(outs, expected, strict=True))
            if error <= point.error_limit:
                found.append(_Contender(fields, run, error, _samples(run, 1)))
            else:
                found.append(Timing(fields, math.inf, error, f"wrong: error {error:.1e}"))
        except Exception as error:  # anything that the compiler or the driver raises
            found.append(Timing(fields, math.inf, math.nan, f"{type(error).__name__}: {_brief(error)}"))
    yield from _repeated(found, timing.num_calls(rounds, calls_a_round))


@dataclasses.dataclass
class _Contender:
    """A config whose results were right."""

    fields: Fields
    run: Callable[[], Any]
    error: float
    samples: list[float]
    """Seconds of a run."""


def _repeated(found: Sequence[_Contender | Timing], calls_a_run: int) -> Iterator[Timing]:
    """Timings of all, in order; medians for those that may be the fastest."""
    fastest = min((min(one.samples) for one in found if isinstance(one, _Contender)), default=math.inf)
    for one in found:
        if isinstance(one, Timing):
            yield one
            continue
        if one.samples[0] <= CLOSE * fastest:
            try:
                one.samples += _samples(one.run, REPEATS - 1)
            except RuntimeError as error:
                yield Timing(one.fields, math.inf, one.error, f"{type(error).__name__}: {_brief(error)}")
                continue
        yield Timing(one.fields, statistics.median(one.samples) / calls_a_run * 1e6, one.error, None)


def _samples(run: Callable[[], Any], repeats: int) -> list[float]:
    """`timing.device_samples`, repeated until all are above 0; RuntimeError after several attempts."""
    found: list[float] = []
    for _ in range(TRIES):
        found += [sample for sample in timing.device_samples(run, repeats - len(found)) if sample > 0]
        if len(found) == repeats:
            return found
    raise RuntimeError(f"no time above 0 in {TRIES} measurements: the host is disturbed")


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _reference(point: Point, inputs: Inputs) -> list[jax.Array]:
    """References in plain jnp, for the first and the last table."""
    call = jax.jit(functools.partial(point.call, implementation="xla"))
    return [
        call(inputs.operands, table, inputs.seq_lens)[0] for table in (inputs.tables[0], inputs.tables[-1])
    ]
