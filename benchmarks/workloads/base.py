"""What run.py asks of an op."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from costs import Cost
from source import timing


class Target(NamedTuple):
    """One way to call ours."""

    title: str
    """For readers: "ours, Pallas without a schedule"."""
    implementation: str | None
    """As the op's `implementation` argument; None lets it choose."""
    scheduled: bool = False
    """With a schedule that was made beforehand, as a model shares one among its layers."""
    compiler_options: dict[str, Any] | None = None


class Runner(NamedTuple):
    """An implementation, compiled or captured, on the inputs of one case."""

    outputs: Callable[[], Sequence[Any]]
    """What `Workload.expected` is compared with."""
    sample: Callable[[], float]
    """Seconds a call, from one burst after a pause."""
    warm_up: Callable[[], None]
    peak_bytes: int | None
    """Device memory of a call besides its inputs; None where it cannot be told."""
    method: str
    """"loop" or "graph"."""

    @classmethod
    def looped(cls, run: Callable[[], Any], calls: int, memory: Any, outputs: Any = None) -> "Runner":
        """Of a jitted loop of so many calls; `memory` as its compiler says; `outputs` if the loop returns others."""
        return cls(
            run if outputs is None else outputs,
            lambda: timing.device_samples(run, 1)[0] / calls,
            functools.partial(timing.warm_up, run),
            None if memory is None else memory.temp_size_in_bytes,
            "loop",
        )


class Workload(abc.ABC):
    """An op. Cases are those of `pallas_attn.testing.cases`, or have as many of their attributes as are used here."""

    op: str
    targets: dict[str, Target]
    error_limit: float
    """Of the worst row's relative error."""
    dispatched: str | None = None
    """The op whose implementations `targets` name, where it is another."""

    def __init__(self, library: Any, small: bool = False):
        """`library`: the package whose functions are called. `small`: few calls take turns, over small pools."""
        self.library, self.small = library, small

    # The four below import the cases themselves: with another checkout's package they are called in another process.

    @abc.abstractmethod
    def cells(self) -> list[Any]:
        """The cases of the tables in the op's README."""

    def options(self) -> list[Any]:
        """Cases that show what an op's options cost or save."""
        return []

    @abc.abstractmethod
    def tiny(self) -> list[Any]:
        """Cases for a CPU, to try the program with."""

    @abc.abstractmethod
    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        """A case for numbers from the command line."""

    @abc.abstractmethod
    def cost(self, case: Any) -> Cost: ...

    @abc.abstractmethod
    def inputs(self, case: Any) -> Any:
        """On the device."""

    @abc.abstractmethod
    def compile(self, case: Any, target: str) -> Callable[[Any], Runner]:
        """One of `targets`, compiled before there are inputs; called in a thread of its own."""

    @abc.abstractmethod
    def compile_expected(self, case: Any) -> Callable[..., list[jax.Array]]:
        """(inputs) -> what is right, by a reference in float32."""

    def refusal(self, target: str) -> str | None:
        """Why one of `targets` cannot run here."""
        implementation = self.targets[target].implementation
        if implementation is None:
            return None
        return self.library.available_implementations()[self.dispatched or self.op][implementation]
