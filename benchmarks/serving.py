"""The HTTP server under load: what it takes of the engine's speed, how soon first tokens come, and what is lost.

    python benchmarks/serving.py                          # a 1B model's sizes, random weights, bfloat16
    python benchmarks/serving.py --what soak --dtype float32 --duration 540
    python benchmarks/serving.py --tiny                   # anywhere, to try it

The server is a process of its own, the clients are others, with plain sockets. What it does, in this order:
    speed     the same requests, `--clients` at a time: the engine alone, by HTTP, by HTTP streamed, in turns; the ratio
              is the median of those of the turns
    first     seconds to the first token, streamed, with 1, 8 and `--clients` clients
    soak      for `--duration` seconds: greedy requests, streamed and not, of which some are given up before or in the
              middle of their answers. Each answer that is waited for is held against one-by-one generation, and pages
              and memory against what they were

Exit status: 0, or 1 if pages were lost or an answer was wrong, other than by bfloat16's rounding.
"""

import argparse
import contextlib
import csv
import http.client
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHECKED, CHECKED_TOKENS = 32, 48  # answers of the soak, and the longest of them
WHAT = ("speed", "first", "soak")
COLUMNS = ("device", "jax", "commit", "size", "dtype", "what", "who", "clients", "requests", "tokens", "seconds",
           "first_p50", "first_p90", "note")  # fmt: skip


class Ask(NamedTuple):
    prompt: list[int]
    tokens: int
    stream: bool = False
    leaves: float | None = None
    """After so many seconds the client goes away."""
    place: int = 0


class Told(NamedTuple):
    """What became of it: seconds to the first token, None if not streamed."""

    ask: Ask
    text: str | None
    first: float | None


# The server's process.


def serve(options: argparse.Namespace) -> None:
    """Listens, and obeys lines of standard input, each answered by a line of JSON."""
    import jax
    import jax.numpy as jnp
    from engine import SMOLLM2_135M, TINY, random_model

    from pallas_attn.models import Engine, LlamaConfig
    from pallas_attn.serve import App, Limits, Served, Server, bound

    sizes = {
        "tiny": TINY,
        "135m": SMOLLM2_135M,
        "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, context_length=8192, rope_theta=500000.0),
    }
    wanted = {"batch_invariant": True} if options.batch_invariant else {}
    model: Any = random_model(sizes[options.size], jnp.dtype(options.dtype), **wanted)
    tokenizer = any_tokenizer(model.config.vocab_size)
    engine = Engine(
        model,
        max_len=options.max_prompt + options.max_answer,
        num_rows=options.clients,
        step_tokens=max(options.step_tokens, options.clients),
        burst=options.burst,
        tokenizer=tokenizer,
    )
    engine.compile()
    if options.switch_interval is not None:
        sys.setswitchinterval(options.switch_interval)

    def run(asked: list[list[Any]], at_once: int) -> dict[str, Any]:
        """Requests by the engine alone."""
        started = time.perf_counter()
        waiting = [(prompt, tokens) for prompt, tokens in asked]
        begun = []
        while waiting or engine.busy:
            while waiting and sum(not request.done for request in begun[-at_once:]) < at_once:
                prompt, tokens = waiting.pop(0)
                begun.append(engine.submit(prompt, max_new_tokens=tokens))
            engine.step()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "texts": [tokenizer.decode(request.answer) for request in begun]}

    def stats() -> dict[str, Any]:
        memory = jax.devices()[0].memory_stats() or {}
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        about = engine.stats()
        return {
            **{
                name: getattr(about, name)
                for name in ("running", "waiting", "pages", "free_pages", "cached_pages")
            },
            "finished": dict(about.finished),
            "device_bytes": memory.get("bytes_in_use", 0),
            "rss": rss,
        }

    limits = Limits()
    server = Server(
        App(Served("model", engine, tokenizer), limits, num_rows=options.clients),
        limits,
        bound("127.0.0.1", 0),
    )

    def obey() -> None:
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps({"run": run, "stats": stats}[name](*arguments)), flush=True)
        server.stop()

    def ready() -> None:
        about = {"url": server.url, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(
            json.dumps({**about, "vocab_size": model.config.vocab_size, "compiled": engine.compile_seconds}),
            flush=True,
        )
        threading.Thread(target=obey, daemon=True).start()

    server.run(ready, lambda left: None)


def any_tokenizer(vocab_size: int) -> Any:
    """Every token a word, as with a real vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from pallas_attn.models import Tokenizer

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"\u0120w{i}" for i in range(vocab_size))][
        -vocab_size:
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(
        tokenizer, bos_token_id=None, eos_token_id=None, stop_token_ids=[], add_bos=False, chat_template=None
    )


class Process:
    """The server, from outside."""

    def __init__(self, arguments: Sequence[str]):
        command = [sys.executable, __file__, *arguments, "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read()
        host, port = self.about["url"].removeprefix("http://").split(":")
        self.address = host, int(port)

    def ask(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the server has ended")
        return json.loads(line)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


# The clients' processes.


def visit(ask: Ask, connection: http.client.HTTPConnection) -> Told:
    body = {"prompt": ask.prompt, "max_tokens": ask.tokens, "temperature": 0, "stream": ask.stream}
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    if ask.leaves is not None:
        assert connection.sock is not None
        connection.sock.settimeout(ask.leaves)
        with contextlib.suppress(TimeoutError):
            connection.sock.recv(1)
        connection.close()
        return Told(ask, None, None)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {answer.read()!r:.300}")
    if not ask.stream:
        return Told(ask, json.loads(answer.read())["choices"][0]["text"], None)
    text, first = [], None
    for line in answer:
        if line.startswith(b"data: {"):
            if first is None:
                first = time.perf_counter() - started
            text.append(json.loads(line[6:])["choices"][0]["text"])
    return Told(ask, "".join(text), first)


def visit_all(
    address: tuple[str, int], asks: list[Ask], next_: Any, count: int, duration: float, begin: Any, told: Any
) -> None:
    """A process of `count` clients: each takes the next request once its last is answered."""
    results = []
    begin.wait()
    until = time.perf_counter() + duration

    def client() -> None:
        connection = http.client.HTTPConnection(*address, timeout=600)
        while time.perf_counter() < until:
            with next_.get_lock():
                place, next_.value = next_.value, next_.value + 1
            if place >= len(asks):
                break
            results.append(visit(asks[place], connection))
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.put(results)


def load(
    server: Process, asks: list[Ask], clients: int, processes: int, duration: float = float("inf")
) -> tuple[float, list[Told]]:
    """(seconds, what became of the requests)"""
    context = multiprocessing.get_context("spawn")
    next_, told = context.Value("l", 0), context.Queue()
    shares = [len(range(i, clients, processes)) for i in range(min(processes, clients))]
    begin = context.Barrier(len(shares) + 1)
    workers = [
        context.Process(target=visit_all, args=(server.address, asks, next_, share, duration, begin, told))
        for share in shares
    ]
    for worker in workers:
        worker.start()
    begin.wait()
    started = time.perf_counter()
    results = [each for _ in workers for each in told.get()]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds, results


# What is measured.


class Report:
    """Prints each figure as it is known, and keeps them for the table."""

    def __init__(self, options: argparse.Namespace, about: dict[str, Any]):
        self._out, self._rows = options.out, []
        self._facts = {"device": about["device"], "jax": about["jax"], "commit": options.commit}
        self._facts |= {"size": options.size, "dtype": options.dtype}

    def add(
        self,
        what: str,
        who: str,
        clients: int,
        told: int,
        tokens: int,
        seconds: float,
        firsts: Sequence[float] = (),
        note: str = "",
    ):
        ranked = sorted(firsts)
        p50, p90 = (f"{ranked[int(len(ranked) * part)]:.4f}" if ranked else "" for part in (0.5, 0.9))
        row = dict(what=what, who=who, clients=clients, requests=told, tokens=tokens, seconds=f"{seconds:.3f}",
                   first_p50=p50, first_p90=p90, note=note)  # fmt: skip
        self._rows.append({**self._facts, **row})
        first = f"  first token {p50} s, 90% {p90} s" if ranked else ""
        print(f"{what:6s} {who:9s} {clients:3d} clients {told:5d} requests {tokens:7d} tokens {seconds:8.2f} s "
              f"{tokens / seconds:8.0f} tokens/s{first}  {note}", flush=True)  # fmt: skip
        if self._out is not None:
            with self._out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self._rows)


def drawn(count: int, vocab_size: int, options: argparse.Namespace, seed: int) -> list[Ask]:
    """Lengths by a seed of their own, so that every turn has the same, and other tokens, which no cache knows."""
    lengths, tokens = random.Random(0), random.Random(seed)
    asks = []
    for _ in range(count):
        prompt = lengths.randint(min(16, options.max_prompt), options.max_prompt)
        answer = round(min(max(lengths.lognormvariate(4.3, 0.9), 8), options.max_answer))
        asks.append(Ask([tokens.randrange(vocab_size) for _ in range(prompt)], answer))
    return asks


def speed(server: Process, options: argparse.Namespace, report: Report) -> None:
    ratios: dict[str, list[float]] = {"HTTP": [], "streamed": []}
    for turn in range(options.turns):
        asks = drawn(options.requests, server.about["vocab_size"], options, 3 * turn + 1)
        tokens = sum(ask.tokens for ask in asks)
        alone = server.ask("run", [[ask.prompt, ask.tokens] for ask in asks], options.clients)["seconds"]
        report.add("speed", "engine", options.clients, len(asks), tokens, alone)
        for index, who in enumerate(ratios):
            asks = drawn(options.requests, server.about["vocab_size"], options, 3 * turn + 2 + index)
            asks = [ask._replace(stream=who == "streamed") for ask in asks]
            seconds, told = load(server, asks, options.clients, options.processes)
            assert len(told) == len(asks)
            ratios[who].append(alone / seconds)
            firsts = [each.first for each in told if each.first is not None]
            note = f"{alone / seconds:.3f} x the engine alone"
            report.add("speed", who, options.clients, len(told), tokens, seconds, firsts, note)
    for who, each in ratios.items():
        print(
            f"  {who}: {statistics.median(each):.3f} x the engine alone, the median of {len(each)}",
            flush=True,
        )


def first(server: Process, options: argparse.Namespace, report: Report) -> None:
    for place, clients in enumerate(sorted({1, min(8, options.clients), options.clients})):
        asks = drawn(max(16, 2 * clients), server.about["vocab_size"], options, 1000 + place)
        asks = [ask._replace(stream=True) for ask in asks]
        seconds, told = load(server, asks, clients, options.processes)
        firsts = [each.first for each in told if each.first is not None]
        report.add("first", "streamed", clients, len(told), sum(ask.tokens for ask in asks), seconds, firsts)


def soak(server: Process, options: argparse.Namespace, report: Report) -> bool:
    """Whether all was right."""
    pool = drawn(CHECKED, server.about["vocab_size"], options, 2000)
    pool = [ask._replace(tokens=min(CHECKED_TOKENS, options.max_answer)) for ask in pool]
    expected = server.ask("run", [[ask.prompt, ask.tokens] for ask in pool], 1)["texts"]
    rng = random.Random(options.seed)

    def one() -> Ask:
        place = rng.randrange(len(pool))
        leaves = rng.expovariate(2) if rng.random() < 0.25 else None
        return pool[place]._replace(stream=rng.random() < 0.5, leaves=leaves, place=place)

    def round_(seconds: float) -> tuple[float, list[Told]]:
        asks = [one() for _ in range(int(500 * seconds) + 4 * options.clients)]
        return load(server, asks, options.clients, options.processes, seconds)

    # What the first requests make the process keep is not lost.
    round_(min(10.0, options.duration))
    before = settled(server)
    seconds, told = round_(options.duration)
    after = settled(server)
    answered = [each for each in told if each.text is not None]
    wrong = sum(each.text != expected[each.ask.place] for each in answered)
    lost = after["pages"] - after["free_pages"] - after["cached_pages"]
    grown = {name: (after[name] - before[name]) / 2**20 for name in ("device_bytes", "rss")}
    note = (
        f"{len(told) - len(answered)} given up; {wrong} wrong; {lost} pages lost; memory of the device "
        f"{grown['device_bytes']:+.1f} MiB, of the process {grown['rss']:+.1f} MiB; {after['finished']}"
    )
    tokens = sum(each.ask.tokens for each in answered)
    report.add("soak", "HTTP", options.clients, len(told), tokens, seconds, note=note)
    exact = options.dtype == "float32" or options.batch_invariant
    return not lost and not (wrong and exact)


def settled(server: Process) -> dict[str, Any]:
    """Once all that was given up has ended."""
    while True:
        stats = server.ask("stats")
        if not stats["running"] + stats["waiting"]:
            return stats
        time.sleep(0.1)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="default: all of it")
    parser.add_argument("--size", choices=("tiny", "135m", "1b"), default="1b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true", help="answers are exact in bfloat16 too")
    parser.add_argument("--clients", type=int, default=64, help="at once; the engine has as many rows")
    parser.add_argument("--processes", type=int, default=8, help="that the clients are dealt to")
    parser.add_argument("--requests", type=int, default=256, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of the soak")
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-answer", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--switch-interval", type=float, help="of Python's threads in the server, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    parser.add_argument("--commit", default="", help="written into the table")
    parser.add_argument("--out", type=Path, help="a CSV file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, short requests, few of them")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size, options.max_prompt, options.max_answer, options.requests = "tiny", 40, 24, 32
        options.clients, options.processes, options.turns = min(options.clients, 8), 2, 1
        options.duration = min(options.duration, 10.0)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.serve:
        serve(options)
        return 0
    server = Process(sys.argv[1:] if arguments is None else arguments)
    about = server.about
    print(f"{about['device']}, jax {about['jax']}; compiled in {about['compiled']:.1f} s", flush=True)
    report = Report(options, about)
    load(server, drawn(2, about["vocab_size"], options, 0), 1, 1)  # what is there once is no figure
    right = True
    try:
        parts: dict[str, Callable[..., Any]] = {"speed": speed, "first": first, "soak": soak}
        for name, part in parts.items():
            if name in options.what:
                right = part(server, options, report) is not False and right
    finally:
        server.end()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
