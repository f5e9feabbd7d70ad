"""The scheduler over random histories, with a pool that holds token ids where a model's holds keys and values.

The "model" answers with a function of everything that it reads through the request's pages. So a page that is lost,
shared wrongly, written by two or read too early shows as a wrong answer.
"""

import zlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pallas_attn.models.prefix_cache import PrefixCache
from pallas_attn.models.scheduler import Scheduler
from pallas_attn.ops.kv_cache.allocator import PageAllocator

pytestmark = pytest.mark.once  # no JAX in it

STOP, VOCABULARY = 0, 7


def answer_to(tokens) -> int:
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def whole_answer(prompt, max_new_tokens, stops=True) -> list[int]:
    answer = []
    while len(answer) < max_new_tokens and not (stops and STOP in answer):
        answer.append(answer_to([*prompt, *answer]))
    return answer


class Device:
    """A pool of token ids, and steps on it."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.pool = [[None] * scheduler.page_size for _ in range(scheduler.allocator.num_pages)]

    def run(self, step, complete=True):
        size, pool = self.scheduler.page_size, self.pool
        self.scheduler.begin(step)
        written = set()
        for chunk in step.chunks:
            assert chunk.count > 0, "an answer follows from a token that is computed"
            for at in range(chunk.start, chunk.start + chunk.count):
                place = chunk.request.pages[at // size], at % size
                assert place not in written, "two requests write one slot"
                written.add(place)
                pool[place[0]][place[1]] = chunk.request.tokens[at]
        answers = {}
        for chunk in step.chunks:
            assert chunk.ahead <= self.scheduler.burst - 1
            seen = [chunk.request.pages[at // size] for at in range(chunk.start + chunk.count)]
            seen = [pool[page][at % size] for at, page in enumerate(seen)]
            assert seen == list(chunk.request.tokens[: len(seen)]), "a request reads what is not its own"
            if chunk.answers:
                answers[chunk.request] = new = [answer_to(seen)]
                # Each further one is written where it belongs, and seen by the next.
                for at in range(chunk.request.length, chunk.request.length + chunk.ahead):
                    if new[-1] == STOP:
                        break
                    page = chunk.request.pages[at // size]
                    assert self.scheduler.allocator.references(page) == 1, "written while others hold it"
                    pool[page][at % size] = new[-1]
                    new.append(
                        answer_to([pool[chunk.request.pages[i // size]][i % size] for i in range(at + 1)])
                    )
        return self.scheduler.complete(step, answers) if complete else []


class Histories(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(2, 12),
        page_size=st.integers(1, 5),
        num_rows=st.integers(1, 4),
        more=st.integers(0, 9),
        burst=st.integers(1, 4),
        prefix_cache=st.booleans(),
    )
    def start(self, num_pages, page_size, num_rows, more, burst, prefix_cache):
        sizes = dict(num_pages=num_pages, page_size=page_size, num_rows=num_rows, burst=burst)
        self.scheduler = Scheduler(**sizes, step_tokens=num_rows + more, prefix_cache=prefix_cache)
        self.device = Device(self.scheduler)
        self.room = num_pages * page_size
        self.requests, self.cancelled = [], set()

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20), new=st.integers(1, 12), data=st.data())
    def submit(self, prompt, new, data):
        if self.requests and data.draw(st.booleans()):  # a further turn of an earlier one
            earlier = data.draw(st.sampled_from(self.requests))
            prompt = [*earlier.tokens, *prompt]
        if len(prompt) + new - 1 > self.room:
            with pytest.raises(
                ValueError, match=r"Scheduler.submit: argument 'prompt': expected with max_new"
            ):
                self.scheduler.submit(prompt, new, [STOP])
        else:
            self.requests.append(self.scheduler.submit(prompt, new, [STOP]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if not request.done:
            self.cancelled.add(request)
        self.scheduler.cancel(request)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            step = self.scheduler.next_step()
            assert bool(step.chunks) == self.scheduler.busy, "something is left to do, and nothing is done"
            stats = self.scheduler.totals
            assert stats.generated_tokens == sum(len(request.answer) for request in self.requests)
            assert sum(stats.finished.values()) == sum(request.done for request in self.requests)
            assert sum(chunk.count for chunk in step.chunks) <= self.scheduler.step_tokens
            oldest = min((r.number for r in self.requests if not r.done), default=None)
            assert oldest is None or oldest in [chunk.request.number for chunk in step.chunks]
            self.device.run(step)

    @rule(begins=st.booleans())
    def give_up(self, begins):
        """An exception, before the step is on its way to the device or after."""
        step = self.scheduler.next_step()
        if begins:
            self.device.run(step, complete=False)

    @invariant()
    def every_page_has_the_owners_that_hold_it(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        remembered = scheduler.prefixes.pages if scheduler.prefixes else []
        holders = [page for r in self.requests for page in r.pages] + remembered
        for page in range(scheduler.allocator.num_pages):
            assert scheduler.allocator.references(page) == holders.count(page)
        held = {page for request in self.requests if not request.done for page in request.pages}
        assert scheduler.free_pages == scheduler.allocator.num_pages - len(held.union(remembered))
        rows = [request.row for request in scheduler.running]
        assert len(set(rows)) == len(rows)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.busy:
                break
            self.device.run(self.scheduler.next_step())
        assert not self.scheduler.busy
        for request in self.requests:
            whole = whole_answer(request.prompt, request.max_new_tokens)
            if request in self.cancelled:
                assert request.answer == whole[: len(request.answer)]
            else:
                assert request.answer == whole
        if self.scheduler.prefixes:
            self.scheduler.prefixes.clear()
        assert self.scheduler.free_pages == self.scheduler.allocator.num_pages
        assert not self.scheduler.next_step().chunks
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_pages


Histories.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


def scheduler_of(**sizes) -> tuple[Scheduler, Device]:
    scheduler = Scheduler(**{"num_pages": 8, "page_size": 4, "num_rows": 2, "step_tokens": 8, **sizes})
    return scheduler, Device(scheduler)


def test_decoding_goes_on_while_a_prompt_arrives_in_chunks():
    scheduler, device = scheduler_of()
    first = scheduler.submit([1], 20)
    device.run(scheduler.next_step())
    second = scheduler.submit([2] * 20, 1)
    counts = []
    while not second.done:
        step = scheduler.next_step()
        counts.append({chunk.request.number: chunk.count for chunk in step.chunks})
        device.run(step)
    assert counts == [{first.number: 1, second.number: count} for count in (7, 7, 6)]


def test_an_equal_prefix_is_neither_computed_nor_stored_twice():
    scheduler, device = scheduler_of(step_tokens=32)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    first = scheduler.submit(prompt, 1)
    device.run(scheduler.next_step())
    assert first.done
    second = scheduler.submit([*prompt[:-1], 6, 6], 1)
    step = scheduler.next_step()
    # Two full pages are shared, no part of the third.
    assert [(chunk.start, chunk.count) for chunk in step.chunks] == [(8, 3)]
    assert [scheduler.allocator.references(page) for page in second.pages] == [2, 2, 1]


def test_the_newest_is_sent_back_and_loses_nothing():
    scheduler, device = scheduler_of(num_pages=4, prefix_cache=False)
    first, second = scheduler.submit([1] * 4, 8), scheduler.submit([2] * 4, 8)
    while scheduler.busy:
        device.run(scheduler.next_step())
    assert (first.preempted, second.preempted > 0) == (0, True)
    for request in (first, second):
        assert request.answer == whole_answer(request.prompt, 8, stops=False)


def test_a_burst_takes_no_page_from_anybody_and_waits_for_prompts():
    scheduler, device = scheduler_of(num_pages=3, page_size=4, burst=8)
    first = scheduler.submit([1], 9)
    second = scheduler.submit([2, 2], 2)
    step = scheduler.next_step()
    assert [chunk.ahead for chunk in step.chunks] == [0, 0], "a prompt is read"
    device.run(step)
    if not (first.done or second.done):
        step = scheduler.next_step()
        # Of three pages the first takes what is left for its whole answer, the second stays in its own.
        assert [chunk.ahead for chunk in step.chunks] == [6, 0], "pages"


def test_a_step_that_is_given_up_may_be_followed_by_another():
    """As after Ctrl-C: it had taken pages ahead that the next one, which reads a prompt, does not ask for."""
    scheduler, device = scheduler_of(burst=8)
    first = scheduler.submit([1], 9)
    assert scheduler.next_step().chunks[0].ahead == 7
    scheduler.submit([2, 2, 2], 1)
    while scheduler.busy:
        device.run(scheduler.next_step())
    assert first.answer == whole_answer([1], 9, stops=False)


def test_tokens_that_never_came_are_asked_for_again():
    scheduler, device = scheduler_of(burst=4)
    request = scheduler.submit([1], 9)
    device.run(scheduler.next_step())
    device.run(scheduler.next_step(), complete=False)
    while scheduler.busy:
        device.run(scheduler.next_step())
    assert request.answer == whole_answer([1], 9, stops=False)


def test_what_was_used_last_is_evicted_last():
    allocator = PageAllocator(3)
    prefixes = PrefixCache(allocator, 2)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        (page,) = allocator.allocate(1)
        prefixes.insert(tokens, [page])
        allocator.free([page])
    allocator.free(prefixes.match([1, 1]))
    assert prefixes.evict(2) == 2
    assert prefixes.match([1, 1])
    assert not prefixes.match([2, 2])
    assert prefixes.evict(1) == 0, "someone holds it"


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_pages": 0}, ValueError, "Scheduler: argument 'num_pages': expected at least 1, got 0"),
        ({"page_size": True}, TypeError, "Scheduler: argument 'page_size': expected an int, got True"),
        ({"step_tokens": 1}, ValueError, "Scheduler: argument 'step_tokens': expected at least 2, got 1"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        scheduler_of(**sizes)


@pytest.mark.parametrize(("prompt", "new"), [([], 1), ([1] * 32, 2)])
def test_requests_that_could_never_be_served_are_refused(prompt, new):
    scheduler, _ = scheduler_of()
    with pytest.raises(ValueError, match=r"Scheduler.submit: argument 'prompt': expected"):
        scheduler.submit(prompt, new)
    assert not scheduler.busy
