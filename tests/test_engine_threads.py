"""One engine and many threads, and signals besides: each request has the tokens that it gets alone."""

import contextlib
import gc
import random
import signal
import threading
import time

import pytest
from engine_support import check_pages, engine_of, whole_answer

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("as_users_have_it")]

THREADS, EACH = 8, 12


def client(engine, number: int, ended: list, count: int = EACH) -> None:
    """Streams requests one after another, and leaves some early."""
    rng = random.Random(number)
    for _ in range(count):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 12))]
        request = engine.submit(prompt, max_new_tokens=rng.randint(1, 14))
        most, tokens = rng.choice([2, 99]), []
        with contextlib.closing(engine.stream(request)) as stream:
            for token in stream:
                tokens.append(token)
                if len(tokens) == most:
                    break
        ended.append((request, tokens))


def started(targets) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def check(engine, ended: list, count: int = EACH) -> None:
    for request, tokens in ended:
        whole = whole_answer(request.prompt, request.max_new_tokens)
        assert request.answer == whole[: len(request.answer)]
        assert tokens == whole[: len(tokens)]
        if request.finish_reason != "cancelled":
            assert request.answer == whole
    engine.step()
    check_pages(engine)
    stats = engine.stats()
    assert sum(stats.finished.values()) == len(ended) == THREADS * count
    assert stats.generated_tokens == sum(len(request.answer) for request, _ in ended)


@pytest.mark.parametrize("num_pages", [None, 16])
def test_threads_stream_and_cancel_side_by_side(num_pages):
    engine, ended = engine_of(seconds=1e-4, num_pages=num_pages), []
    threads = started(lambda number=number: client(engine, number, ended) for number in range(THREADS))
    last = engine.stats()
    while any(thread.is_alive() for thread in threads):
        stats = engine.stats()
        assert stats.generated_tokens >= last.generated_tokens
        assert sum(stats.finished.values()) >= sum(last.finished.values())
        assert 0 <= stats.running <= 3
        last = stats
        time.sleep(1e-4)
    assert not engine.busy
    check(engine, ended)


def test_nothing_waits_for_a_step():
    """A step of a minute, were it waited for."""
    engine, inside, go_on = engine_of(), threading.Event(), threading.Event()

    def device() -> None:
        inside.set()
        assert go_on.wait(60)

    engine._runner.programs.fails = device
    first = engine.submit([1, 2], max_new_tokens=4)
    second = engine.submit([2, 1], max_new_tokens=4)
    (stepping,) = started([engine.step])
    assert inside.wait(60)
    third = engine.submit([1], max_new_tokens=4)
    engine.cancel(second)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished["cancelled"]) == (1, 1, 1)
    assert second.done
    assert engine.busy
    assert stepping.is_alive(), "still at it"
    go_on.set()
    stepping.join()
    while engine.busy:
        engine.step()
    assert not second.answer
    assert [first.answer, third.answer] == [whole_answer([1, 2], 4), whole_answer([1], 4)]
    check_pages(engine)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go elsewhere")
def test_signals_between_threads():
    """The main thread, which alone hears Ctrl-C, makes steps too, and is interrupted at random."""
    engine, ended, rng = engine_of(seconds=1e-4), [], random.Random(0)
    hearing, heard = False, 0

    def interrupt(*_):
        nonlocal heard
        if hearing:
            heard += 1
            raise KeyboardInterrupt

    gc.disable()  # JAX has a callback in it, out of which nothing comes
    before = signal.signal(signal.SIGALRM, interrupt)
    threads = started(lambda number=number: client(engine, number, ended, 80) for number in range(THREADS))
    try:
        while any(thread.is_alive() for thread in threads):
            try:
                hearing = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
                engine.step()
                hearing = False
            except KeyboardInterrupt:
                hearing = False
    finally:
        hearing = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert heard > 20
    check(engine, ended, 80)
