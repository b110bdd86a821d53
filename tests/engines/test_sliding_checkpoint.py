"""Off-loaded inputs of checkpointed regions give the same gradients."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardlab.core.errors import UserError
from shardlab.engines.sliding_checkpoint import SlidingCheckpoint
from shardlab.engines.activation_stores import FileStore, HostStore
from tests.engines.storages import alive, watch

WIDTH, ROWS, LAYERS = 16, 128, 6
PLAIN = partial(checkpoint, use_reentrant=False)
SELECTIVE = partial(
    PLAIN, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
)


class Recorder(HostStore):
    """Says what was asked for, by the number of the tensor."""

    def __init__(self):
        super().__init__()
        self.tickets, self.calls = [], []

    def put(self, tensor):
        self.tickets.append(super().put(tensor))
        self.calls.append(("put", len(self.tickets) - 1))
        return self.tickets[-1]

    def prefetch(self, ticket):
        self.calls.append(("prefetch", self.tickets.index(ticket)))
        super().prefetch(ticket)

    def take(self, ticket):
        self.calls.append(("take", self.tickets.index(ticket)))
        return super().take(ticket)

    def drop(self, ticket):
        self.calls.append(("drop", self.tickets.index(ticket)))
        super().drop(ticket)

    def numbers(self, call):
        return [number for name, number in self.calls if name == call]


@pytest.fixture(params=["host", "file"])
def store(request, tmp_path):
    made = HostStore() if request.param == "host" else FileStore(tmp_path)
    yield made
    made.close()


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(LAYERS)
    )


def forward(layers, again=PLAIN, seed=1):
    torch.manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH).requires_grad_() * 1
    for layer in layers:
        hidden = again(layer, hidden)
    return hidden.exp().mean()


def gradients(layers):
    found = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return found


def backward(layers, context, **options):
    with context:
        loss = forward(layers, **options)
    loss.backward()
    return gradients(layers)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("again", [PLAIN, SELECTIVE], ids=["full", "selective"])
def test_gradients_are_the_same_bits_step_after_step(layers, store, again):
    expected = backward(layers, nullcontext(), again=again)
    sliding = SlidingCheckpoint(store)
    for _ in range(3):
        assert equal(backward(layers, sliding, again=again), expected)


def test_backward_may_run_inside_of_the_block(layers, store):
    expected = backward(layers, nullcontext())
    with SlidingCheckpoint(store):
        forward(layers).backward()
    assert equal(gradients(layers), expected)


def test_checkpoints_within_checkpoints_are_the_same_bits(layers, store):
    def pairs(hidden, first):
        for layer in layers[first : first + 2]:
            hidden = PLAIN(layer, hidden)
        return hidden

    def again(layer, hidden):
        index = [*layers].index(layer)
        return hidden if index % 2 else PLAIN(pairs, hidden, index)

    expected = backward(layers, nullcontext(), again=again)
    assert equal(backward(layers, SlidingCheckpoint(store), again=again), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_passes_may_all_come_before_the_first_backward(layers, store, order):
    def run_or_fail_together(context):
        losses = []
        for seed in range(3):
            with context:
                losses.append(forward(layers, seed=seed))
        for number in order:
            losses[number].backward()
        return gradients(layers)

    assert equal(
        run_or_fail_together(SlidingCheckpoint(store)), run_or_fail_together(nullcontext())
    )


def test_a_graph_that_is_kept_goes_backward_again(layers, store):
    expected = backward(layers, nullcontext())
    with SlidingCheckpoint(store):
        loss = forward(layers)
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert equal(gradients(layers), expected)


def test_second_derivatives_are_the_same_bits(layers, store):
    def second(context):
        with context:
            torch.manual_seed(1)
            given = torch.randn(ROWS, WIDTH).requires_grad_()
            hidden = given * 1
            for layer in layers:
                hidden = PLAIN(layer, hidden)
        slope = torch.autograd.grad(hidden.sum(), given, create_graph=True)[0]
        slope.square().sum().backward()
        return [given.grad]

    assert equal(second(SlidingCheckpoint(store)), second(nullcontext()))


def test_inputs_are_gone_between_forward_and_backward(layers, store):
    inputs = []

    def again(layer, hidden):
        inputs.append(watch(hidden))
        return PLAIN(layer, hidden)

    with SlidingCheckpoint(store):
        loss = forward(layers, again)
        store._out.drain()
    # there are the last one, and two that may still be under way
    expected = [False] * (LAYERS - 3) + [True] * 3
    assert alive(inputs, expected) == expected
    loss.backward()


def test_next_inputs_are_prefetched_during_backward(layers):
    store = Recorder()
    with SlidingCheckpoint(store):
        loss = forward(layers)
    assert store.numbers("put") == [*range(LAYERS - 1)]
    loss.backward()
    calls = store.calls
    assert store.numbers("take") == [*range(LAYERS - 1)][::-1] == store.numbers("drop")
    for number in range(LAYERS - 2):
        asked = calls.index(("prefetch", number))
        assert asked < calls.index(("take", number + 1)), "a region ahead"
        if number < LAYERS - 3:
            assert calls.index(("drop", number + 2)) < asked, "and no more than one"


def test_tensor_saved_by_several_regions_is_offloaded_once(layers):
    store = Recorder()

    def run(context):
        torch.manual_seed(1)
        hidden = torch.randn(ROWS, WIDTH).requires_grad_() * 1
        common = hidden * 2
        with context:
            for layer in layers:
                hidden = PLAIN(lambda h, c, layer=layer: layer(h) + c, hidden, common)
        hidden.square().mean().backward()
        return gradients(layers)

    expected = run(nullcontext())
    assert equal(run(SlidingCheckpoint(store)), expected)
    assert len(store.tickets) == LAYERS, "one per region but the last, and the common one"
    assert len(store.numbers("take")) == LAYERS == len(store.numbers("drop"))


def test_parameters_their_views_masks_and_small_tensors_stay():
    store, weight = Recorder(), nn.Parameter(torch.randn(64, 64))
    mask, small = torch.ones(64, 64), torch.ones(4, requires_grad=True)

    def region(hidden, *others):
        return hidden @ others[0] @ others[1] * mask + others[3].sum()

    with SlidingCheckpoint(store):
        hidden = torch.randn(64, 64).requires_grad_() * 1
        for _ in range(3):
            hidden = PLAIN(region, hidden, weight, weight.t(), mask, small)
    hidden.sum().backward()
    assert len(store.tickets) == 2


def test_forward_without_backward_frees_the_store(layers):
    store = Recorder()
    sliding = SlidingCheckpoint(store)
    with sliding:
        loss = forward(layers)
    del loss
    assert sorted(store.numbers("drop")) == store.numbers("put")


def test_other_saved_tensors_need_no_garbage_collector(layers, store):
    gc.disable()
    try:
        with SlidingCheckpoint(store):
            hidden = PLAIN(layers[0], torch.randn(ROWS, WIDTH).requires_grad_() * 1)
            saved = hidden.exp()  # keeps what it returns
        gone = weakref.ref(saved)
        del saved, hidden
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["at once", "a region later", "outside of regions"])
def test_a_change_in_place_is_refused_as_it_is_without(layers, store, when):
    def run(context):
        with context:
            hidden = torch.randn(ROWS, WIDTH).requires_grad_() * 1
            after = PLAIN(layers[0], hidden)
            if when == "a region later":
                after = PLAIN(layers[1], after)
            if when == "outside of regions":
                hidden = after * 1
                after = hidden.square()
            hidden.add_(1)
            loss = after.sum()
        loss.backward()

    for context in (nullcontext(), SlidingCheckpoint(store)):
        with pytest.raises(RuntimeError, match=r"(in ?place)"):
            run(context)


def test_a_block_that_checkpoints_nothing_is_refused(layers, store):
    for again in (lambda layer, x: layer(x), partial(checkpoint, use_reentrant=True)):
        with (
            pytest.raises(UserError, match="nothing was checkpointed"),
            SlidingCheckpoint(store),
        ):
            forward(layers, again)
    with SlidingCheckpoint(store), torch.no_grad():
        forward(layers)


def test_it_is_not_entered_twice_and_an_error_of_the_block_passes(layers, store):
    sliding = SlidingCheckpoint(store)
    with pytest.raises(RuntimeError, match="entered already"), sliding, sliding:
        pass
    with pytest.raises(ZeroDivisionError), sliding:
        raise ZeroDivisionError
    with sliding:
        forward(layers).backward()
