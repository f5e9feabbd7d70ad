"""From a case and names of implementations to rows: built, checked against the reference, and only then timed.

Implementations of a case take turns, each second round in reverse, with a pause before every burst: a card that runs
hot lowers its clock, and order would matter.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import baselines
import jax
import reference
import results
import roofline
from results import Row
from source import timing
from workloads.base import Runner, Workload
from workloads.decode import PagedWorkload
from workloads.dense import DenseWorkload

ROUNDS, QUICK_ROUNDS = 7, 3
# A call of ten microseconds may differ by a tenth from burst to burst, and may not in the next process. Until the
# middle of everyone's samples is no wider than this share of the median, there are more rounds, for everyone.
SETTLED, MOST_ROUNDS = 0.02, 11
MOST_SECONDS = 4.0  # that the samples of one implementation at one case may take; plain jnp gets fewer
MIB = 1 << 20


class Facts(NamedTuple):
    """What all rows of a run share."""

    device: str
    driver: str
    jax: str
    torch: str
    commit: str
    options: str
    roof: roofline.Roof | None

    @property
    def place(self) -> tuple[str, str, str, str]:
        """As `Row.place`."""
        return (self.device, self.jax, self.commit, self.options)


class Candidate(NamedTuple):
    """An implementation at one case, on its way to a row."""

    name: str
    """On the command line."""
    title: str
    error_limit: float
    compiled: dict[str, Future[Callable[[Any], Runner]]]
    """Of each variant, those that are compiled beforehand."""
    expected: Future[Callable[[Any], list[jax.Array]]]
    build: Callable[[Any], dict[str, Runner]] | None
    """Of the others."""


class Outcome(NamedTuple):
    """What became of one candidate."""

    samples: Sequence[float] = ()
    error: float | None = None
    peak_bytes: int | None = None
    method: str = ""
    note: str = ""
    wrong: bool = False


@dataclasses.dataclass
class Contender:
    """A variant whose output was right."""

    candidate: Candidate
    variant: str
    runner: Runner
    error: float
    samples: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """Spent on samples."""


def titles(workload: Workload) -> dict[str, str]:
    """{name on the command line: name for readers} of everything that can be asked for, ours first."""
    ours = {name: target.title for name, target in workload.targets.items()}
    return ours | {name: peer.TITLE for name, peer in baselines.for_op(workload.op).items()}


def refusal(workload: Workload, name: str) -> str | None:
    """Why an implementation cannot run here at all."""
    if name in workload.targets:
        return workload.refusal(name)
    return baselines.load(name).available()


def candidates(
    workload: Workload, case: Any, names: Sequence[str], pool: ThreadPoolExecutor
) -> tuple[list[Candidate], dict[str, Outcome]]:
    """Those that serve the case, being compiled; and why others do not."""
    found, refused = [], {}
    expected = functools.cache(lambda **order: pool.submit(workload.compile_expected, case, **order))
    for name in names:
        if name in workload.targets:
            title, limit, peer = workload.targets[name].title, workload.error_limit, None
            compiled = {"": pool.submit(workload.compile, case, name)}
            found.append(Candidate(name, title, limit, compiled, expected(), None))
            continue
        peer = baselines.load(name)
        if reason := peer.supports(case):
            refused[name] = Outcome(note=f"cannot serve this case: {reason}")
        elif isinstance(workload, DenseWorkload) and hasattr(peer, "attend"):
            call = workload.whole(case, peer.attend(case))
            compiled = {"": pool.submit(workload.compile_call, case, call, peer.PLAIN)}
            found.append(Candidate(name, peer.TITLE, workload.error_limit, compiled, expected(), None))
        elif isinstance(workload, PagedWorkload) and hasattr(peer, "variants"):
            compiled = {
                variant: pool.submit(workload.compile_loop, case, call, lambda lengths: None, peer.PLAIN)
                for variant, call in peer.variants(case).items()
            }
            limit = peer.ERROR_LIMIT or workload.error_limit
            order = {} if peer.ORDER == reference.PAGES_FIRST else {"order": peer.ORDER}
            found.append(Candidate(name, peer.TITLE, limit, compiled, expected(**order), None))
        else:
            build = functools.partial(torch_runners, peer, case)
            found.append(Candidate(name, peer.TITLE, workload.error_limit, {}, expected(), build))
    return found, refused


def torch_runners(peer: Any, case: Any, inputs: Any) -> dict[str, Runner]:
    import graphs  # imports torch, which ours do without

    tensors = baselines.as_tensors(inputs)

    def runner(call: Callable[[int], Any]) -> Runner:
        captured = functools.cache(lambda: graphs.Captured(call, len(tensors.tables)))
        return Runner(
            lambda: [call(i).float().cpu().numpy() for i in (0, len(tensors.tables) - 1)],
            lambda: captured().sample(),
            lambda: None,
            graphs.peak_bytes(call),
            "graph",
        )

    return {variant: runner(call) for variant, call in peer.build(case, tensors).items()}


def outcomes(
    workload: Workload, case: Any, found: Sequence[Candidate], rounds: int, most_rounds: int | None = None
) -> Iterator[tuple[str, Outcome]]:
    """(name, what became of it) of each candidate, once all were timed; wrong ones before any is timed. There are
    `rounds` of samples, and up to `most_rounds`, MOST_ROUNDS by default, while they differ."""
    try:
        inputs = workload.inputs(case)
    except Exception as error:
        if not out_of_memory(error):
            raise
        yield from ((candidate.name, Outcome(note="out of memory for the inputs")) for candidate in found)
        return
    contenders, failed = [], {}
    expected = functools.cache(lambda future: future.result()(inputs))
    for candidate in found:
        right, outcome = checked(candidate, inputs, expected(candidate.expected))
        contenders += right
        if not right:
            failed[candidate.name] = outcome
    yield from failed.items()
    if contenders:
        contenders[0].runner.warm_up()
    for number in range(max(rounds, most_rounds or MOST_ROUNDS)):
        if number >= rounds and all(map(settled, contenders)):
            break
        for contender in contenders[:: -1 if number % 2 else 1]:
            if contender.seconds < MOST_SECONDS:
                start = time.perf_counter()
                contender.samples.append(contender.runner.sample())
                contender.seconds += time.perf_counter() - start
    for candidate in found:
        own = [contender for contender in contenders if contender.candidate is candidate]
        if own:
            best = min(own, key=lambda contender: sorted(contender.samples)[len(contender.samples) // 2])
            peak, method = best.runner.peak_bytes, best.runner.method
            yield candidate.name, Outcome(best.samples, best.error, peak, method, best.variant)


def settled(contender: Contender) -> bool:
    """Whether further samples would hardly move the median, or there will be none."""
    if contender.seconds >= MOST_SECONDS:
        return True
    low, median, high = (results.percentile(contender.samples, percent) for percent in (20, 50, 80))
    return high - low <= SETTLED * median


def checked(candidate: Candidate, inputs: Any, expected: list[jax.Array]) -> tuple[list[Contender], Outcome]:
    """The variants that are right; and, of no use unless there are none, what went wrong."""
    right, problem = [], Outcome(note="has no variant for this case")
    try:
        runners = candidate.build(inputs) if candidate.build else {}
    except Exception as error:
        return [], Outcome(note=explained(candidate, error))
    for variant in [*candidate.compiled, *runners]:
        try:
            runner = runners[variant] if variant in runners else candidate.compiled[variant].result()(inputs)
            error = reference.worst_error(runner.outputs(), expected)
        except Exception as problem_of_variant:
            problem = Outcome(note=explained(candidate, problem_of_variant))
            continue
        if error <= candidate.error_limit:
            right.append(Contender(candidate, variant, runner, error))
        else:
            note = f"WRONG: error {error:.1e}, expected at most {candidate.error_limit:.0e}"
            problem = Outcome(error=error, note=note, wrong=True)
    return right, problem


def out_of_memory(error: Exception) -> bool:
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "out of memory"))


def explained(candidate: Candidate, error: Exception) -> str:
    """Why an implementation has no figure at a case. Raises the error if it is none to be expected of it."""
    if out_of_memory(error):
        return "out of memory"
    if candidate.name in baselines.PEERS:
        return f"{type(error).__name__}: {baselines.first_line(error)}"
    if "cannot serve this call" in str(error):
        return baselines.first_line(error)
    raise error


def row_of(facts: Facts, workload: Workload, case: Any, name: str, outcome: Outcome, repro: str) -> Row:
    title = titles(workload)[name]
    lengths = case.seq_lens
    peer_limit = getattr(baselines.load(name), "ERROR_LIMIT", None) if name in baselines.PEERS else None
    figures: dict[str, Any] = {}
    note = outcome.note
    if outcome.samples:
        cost = workload.cost(case)
        roof = facts.roof and cost.seconds(facts.roof.flops_a_second, facts.roof.bytes_a_second)
        figures = results.timed(outcome.samples, *cost, roof)
        problem = _problem(facts, figures)
        note = problem or note
        figures["ok"] = problem is None
    return Row(
        *facts[:6],
        op=workload.op,
        case=case.id,
        implementation=title,
        method=outcome.method,
        dtype=getattr(case, "cache_dtype", None) or case.dtype,
        batch=len(lengths),
        seqlen=round(sum(lengths) / len(lengths)),
        heads=case.num_heads,
        kv_heads=case.num_kv_heads,
        q_len=case.q_len,
        peak_mib=None if outcome.peak_bytes is None else outcome.peak_bytes / MIB,
        error=outcome.error,
        limit=peer_limit or workload.error_limit,
        note=note,
        repro=repro,
        **figures,
    )


def _problem(facts: Facts, figures: dict[str, Any]) -> str | None:
    """Why figures cannot be true."""
    if figures["median_us"] <= 0:
        return "broken: no longer than the host's part, which was taken off"
    return roofline.broken(facts.device, figures["tflops"], figures["gbs"])


def roof_rows(facts: Facts, sizes: roofline.Sizes, rounds: int, repro: str) -> Iterator[Row]:
    for case, (run, flops, num_bytes) in roofline.measurements(sizes).items():
        timing.warm_up(run)
        samples = [seconds / roofline.STEPS for seconds in timing.device_samples(run, rounds)]
        figures = results.timed(samples, flops, num_bytes, None)
        problem = _problem(facts, figures)
        figures["tflops"] = figures["tflops"] if flops else None
        figures["gbs"] = figures["gbs"] if num_bytes else None
        yield Row(
            *facts[:6],
            op=roofline.OP,
            case=case,
            implementation=roofline.IMPLEMENTATION,
            method="loop",
            dtype="bfloat16" if flops else "int32",
            batch=1,
            seqlen=0,
            heads=0,
            kv_heads=0,
            q_len=0,
            ok=problem is None,
            note=problem or "",
            repro=repro,
            **figures,
        )
