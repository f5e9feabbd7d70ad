"""Timing the configs of one kind of call, each checked against the reference before its time counts; for any op."""

import abc
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.op import Op
from pallas_attn.testing.cases import Case
from pallas_attn.tuning import timing
from pallas_attn.tuning.errors import LARGEST_ERROR, worst_error

REPEATS = 3  # enough to rank configs
# What takes longer than this many times the fastest is timed once: no repeat would make it the fastest.
CLOSE = 1.05
# Of a sample of no time or less, which is what a disturbed measurement can come to.
TRIES = 3
BYTES_PER_SECOND = 2.5e12  # a guess, for how many calls make a burst

# What entries have ranges of.
RANGES = ("rows", "streams", "max_len")

type Fields = dict[str, int]
"""Of a config: what differs from the heuristic's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point(abc.ABC):
    """One kind of call of an op: a case all of whose sequences are as long as the block table allows. An op's own
    point says how such a case is called; registry.py lists them."""

    op: ClassVar[Op]
    sizes: ClassVar[Mapping[str, Any]]
    """What the command line may set beside num_seqs and max_len, with defaults."""

    case: Case

    @classmethod
    @abc.abstractmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[Point]":
        """The points to tune for these sizes."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """In a word or two, what sets this point apart from others of its size."""

    @property
    def usual_seconds(self) -> float:
        """That a call roughly takes."""
        return self.read_bytes / BYTES_PER_SECOND

    @property
    def error_limit(self) -> float:
        return LARGEST_ERROR[self.case.dtype]

    @property
    @abc.abstractmethod
    def read_bytes(self) -> int:
        """Of the caches, by one call."""

    def abstract(self) -> Any:
        """The op's operands, as the point's call has them; of shapes alone."""
        raise NotImplementedError

    def struct(self, shape: Sequence[int], dtype: Any = "int32") -> Any:
        """An array of theirs."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def key(self) -> dict[str, Any]:
        """What an entry's key says of this point, beside its ranges."""
        return {
            name: fact for name, fact in (self.op.key(self.abstract()) or {}).items() if name not in RANGES
        }

    def config(self, **fields: Any) -> Any:
        """What a call takes that finds `fields` measured."""
        return self.op.heuristic(self.abstract(), **fields)

    def tiles(self, fields: Fields) -> Any:
        """Of the config, what the point's calls are cut up by."""
        return self.config(**fields)

    def chosen(self, fields: Fields) -> Fields:
        """What an entry keeps of the fastest config: all of it but what follows from the call."""
        kept = dataclasses.asdict(self.tiles(fields))
        return {name: kept[name] for name in kept if name not in ("num_splits", "split_tokens")}

    def fields_of(self, config: dict[str, Any]) -> Fields:
        """What `config` takes of a whole entry's."""
        return config

    @abc.abstractmethod
    def candidates(self) -> list[Fields]:
        """Fields worth trying, the heuristic's (none) first."""

    @abc.abstractmethod
    def inputs(self) -> "Inputs":
        """What calls are timed on."""

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

    def distinct(self, found: Sequence[Fields]) -> list[Fields]:
        """Without fields that make the same config as earlier ones."""
        configs: dict[Any, Fields] = {}
        for fields in found:
            configs.setdefault(self.config(**fields), fields)
        return list(configs.values())


class Inputs(NamedTuple):
    """What the calls of a point are timed on."""

    operands: Any
    tables: tuple[Any, ...]
    """What each call of a round has of its own: a block table, of disjoint pages where those are few."""
    seq_lens: jax.Array | None
    """None where calls take none."""


class Timing(NamedTuple):
    """What became of a config. `problem` says why its time does not count."""

    fields: Fields
    microseconds: float
    error: float
    problem: str | None


def measure(point: Point, choices: Sequence[Fields], implementation: str = "pallas") -> Iterator[Timing]:
    """The timing of each choice of fields, in the order of `choices`; all are compiled before the first is timed,
    because compiling beside a measurement disturbs it, and all are timed once before some are timed again."""
    try:
        inputs = point.inputs()
    except MemoryError as error:  # numpy's; jax's is a RuntimeError of many lines
        problem = f"{type(error).__name__}: {_brief(error)}"
        yield from (Timing(fields, math.inf, math.nan, problem) for fields in choices)
        return
    calls_a_round = len(inputs.tables)
    rounds, plain = timing.num_rounds(point.usual_seconds, calls_a_round), False
    if implementation == "interpret":  # to try this out: slow, and jnp to the compiler
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
        except Exception as error:  # whatever the compiler or the driver has against this config
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
    """Timings of all, in order; those that may be the fastest are medians."""
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
    """`timing.device_samples` that are all above 0; RuntimeError where there is no having them."""
    found: list[float] = []
    for _ in range(TRIES):
        found += [sample for sample in timing.device_samples(run, repeats - len(found)) if sample > 0]
        if len(found) == repeats:
            return found
    raise RuntimeError(f"no time above 0 in {TRIES} measurements: the host is disturbed")


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _reference(point: Point, inputs: Inputs) -> list[jax.Array]:
    """In plain jnp, for the first and for the last table."""
    call = jax.jit(functools.partial(point.call, implementation="xla"))
    return [
        call(inputs.operands, table, inputs.seq_lens)[0] for table in (inputs.tables[0], inputs.tables[-1])
    ]
