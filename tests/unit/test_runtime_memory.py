"""What steps hold: predicted as it is seen, and nothing longer than it is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from oracles.memorycases import peaks
from oracles.ranks import Ranks
from torch import nn

from soapstone.cost.at_hand import device_at_hand
from soapstone.cost.candidates import candidates
from soapstone.cost.runs import Runs
from soapstone.frontends.source import load
from soapstone.ops.box import Box, Interval
from soapstone.runtime.ports import Outlet
from soapstone.runtime.region import STAND_IN_BYTES, Region
from soapstone.runtime.weights import Holding
from soapstone.tasks.kept import kept

MLP = "mlp:features=256,hidden=256,layers=4"
WIDE = "mlp:features=512,hidden=512,layers=8"
UNET = "unet:image=64,channels=8"
LLAMA = "llama_1b:layers=2,hidden=256,heads=4,key_value_heads=2,feed_forward=512,sequence=64,vocabulary=1000"
VIT = "vit_l:layers=2,hidden=256,heads=4,feed_forward=1024,image=64,patch=8,classes=100"
RNNTC = "rnntc:hidden=256,steps=4,vocabulary=100"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("model", "batch", "strategy"),
    [
        (MLP, 256, "data_parallel"),  # gradients move into buckets, which stay
        (MLP, 256, "random 1"),  # leaves of regions, and gradients that regions start from
        (RNNTC, 64, "data_parallel"),  # what cells keep, and sums of their weights' gradients
        (RNNTC, 64, "random 2"),  # parts of weights that several cells read
        ("lenet", 128, "single_device"),  # scratch memory of one operator after the other
        ("lenet", 128, "random 3"),
        (WIDE, 256, "zero"),  # parts of weights that are given as they are, and gradients added up for them
        (UNET, 8, "model_parallel"),  # gradients that are taken when a region starts, and used later
        (LLAMA, 16, "random 5"),  # sums of which a collective adds up a copy
        (LLAMA, 16, "zero"),  # leaves with their axes in another order
        (VIT, 16, "pipeline"),  # the gradient of a class token, a small part of another
        (VIT, 16, "random 7"),  # views of a projection that hold all of it
    ],
)
def test_peaks_are_predicted(model: str, batch: int, strategy: str, ranks: Ranks) -> None:
    predicted, seen = ranks.run(peaks, 2, model, batch, strategy)[0]
    most = max(range(2), key=lambda rank: seen[rank])
    assert predicted[most] == pytest.approx(seen[most], rel=0.03)


@pytest.mark.parametrize("model", ["lenet", "inception_v3", "gpt2", "vit_l", "rnnlm"])
def test_what_torch_keeps_of_operands_and_outputs_is_known(model: str) -> None:
    """For all that a model's operators do, at their whole size."""
    graph = load(model, tiny=True).captured().graph
    place = device_at_hand("cpu", "cpu", 1, 1)
    for candidate in candidates(graph, [1]):
        if candidate.backward is None:
            continue
        runs, saved = Runs(candidate, place), list[torch.Tensor]()
        given = runs.leaves()

        def pack(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = runs.forward(given)
        places = {tensor.untyped_storage().data_ptr() for tensor in saved}
        known = kept(graph, candidate.node)
        for i, operand in enumerate(given):
            name = candidate.node.operands[i]
            is_value = isinstance(name, str) and name in graph.producers
            if isinstance(operand, torch.Tensor) and operand.is_floating_point() and is_value:
                assert (operand.untyped_storage().data_ptr() in places) <= (i in known.operands), name
        if candidate.node.op.keeps is not None and len(made) == 1:
            assert (made[0].untyped_storage().data_ptr() in places) == known.output, candidate.node.op_name


# -- nothing is held longer than it is needed -----------------------------------------------------------


def test_a_leaf_does_not_hold_what_no_operator_needs() -> None:
    region, outlet = Region(0), Outlet(())
    tensor = torch.randn(STAND_IN_BYTES // 4 + 1, dtype=torch.float32)
    held = weakref.ref(tensor.untyped_storage())
    made = region.leaf(tensor, outlet) * 3.0
    gradient = Outlet(())
    gradient.put(torch.arange(float(made.numel())))
    region.root(made, [gradient])
    del tensor, made
    assert held() is None
    region.backward()
    assert outlet.tensor is not None
    assert torch.equal(outlet.tensor, 3.0 * torch.arange(float(outlet.tensor.numel())))


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_a_leaf_with_its_axes_in_another_order_holds_nothing_and_copies_nothing(
    order: tuple[int, ...],
) -> None:
    """What is turned, the queries of attention among it, has gradients that are turned likewise."""
    region, outlet, gradient = Region(0), Outlet(()), Outlet(())
    region.on_gradient = lambda: None
    tensor = torch.randn(4, STAND_IN_BYTES // 8, 3).permute(order)
    held = weakref.ref(tensor.untyped_storage())
    made = region.leaf(tensor, outlet) * 3.0
    assert made.shape == tensor.shape
    gradient.put(torch.randn_like(made))
    region.root(made, [gradient])
    del tensor, made
    assert held() is None
    region.backward()
    assert outlet.tensor is not None
    assert gradient.tensor is not None
    assert torch.equal(outlet.tensor, 3.0 * gradient.tensor)
    assert outlet.tensor.stride() == gradient.tensor.stride()


def test_a_leaf_is_gone_when_it_has_been_taken_back() -> None:
    """Without the garbage collector, which is set aside while steps run."""
    region, outlet, gradient = Region(0), Outlet(()), Outlet(())
    region.on_gradient = lambda: None
    leaf = region.leaf(torch.randn(3), outlet)
    gone = weakref.ref(leaf)
    made = leaf * 3.0
    gradient.put(torch.ones(3))
    region.root(made, [gradient])
    del leaf, made
    gc.disable()
    try:
        region.backward()
        assert gone() is None
    finally:
        gc.enable()


def test_a_gradient_that_is_a_small_part_of_another_does_not_hold_it() -> None:
    region, outlet, gradient = Region(0), Outlet(()), Outlet(())
    made = torch.cat([region.leaf(torch.randn(1, 4), outlet), torch.randn(64, 4)])
    gradient.put(torch.randn_like(made))
    region.root(made, [gradient])
    region.backward()
    assert outlet.tensor is not None
    assert gradient.tensor is not None
    assert torch.equal(outlet.tensor, gradient.tensor[:1])
    assert outlet.tensor.untyped_storage().nbytes() == outlet.tensor.nbytes


def test_a_leaf_that_is_a_part_does_not_hold_the_whole() -> None:
    region, outlet, gradient = Region(0), Outlet(()), Outlet(())
    whole = torch.randn(4, STAND_IN_BYTES)
    held = weakref.ref(whole.untyped_storage())
    made = region.leaf(whole[:, : STAND_IN_BYTES // 2], outlet) * 3.0
    gradient.put(torch.randn_like(made))
    region.root(made, [gradient])
    del whole, made
    assert held() is None
    region.backward()
    assert outlet.tensor is not None
    assert gradient.tensor is not None
    assert torch.equal(outlet.tensor, 3.0 * gradient.tensor)


def test_a_leaf_holds_what_an_operator_needs() -> None:
    region, outlet, gradient = Region(0), Outlet(()), Outlet(())
    tensor = torch.randn(STAND_IN_BYTES // 4 + 1)
    made = region.leaf(tensor, outlet).square()
    gradient.put(torch.ones_like(made))
    region.root(made, [gradient])
    expected = 2 * tensor
    del tensor, made
    region.backward()
    assert outlet.tensor is not None
    assert torch.equal(outlet.tensor, expected)


def test_a_loss_that_is_kept_lets_go_of_its_graph() -> None:
    outlet = Outlet(())
    outlet.is_kept = True
    leaf = torch.ones(10, requires_grad=True)
    outlet.put(leaf.sum())
    held = weakref.ref(leaf)
    outlet.release()
    del leaf
    assert held() is None
    assert outlet.tensor is not None
    assert float(outlet.tensor) == 10


def test_cells_share_one_copy_of_a_part_of_their_weight() -> None:
    def box(*bounds: tuple[int, int]) -> Box:
        return tuple(Interval(*each) for each in bounds)

    whole, part = box((0, 4), (0, 6), (0, 3)), box((0, 4), (3, 6), (0, 3))
    holding = Holding("w", whole, nn.Parameter(torch.randn(4, 6, 3)))
    for _ in range(2):
        holding.expect(part)
    with torch.no_grad():
        first = holding.read(part)
    assert holding.read(part) is first
    assert first.is_contiguous()
    assert torch.equal(first, holding.parameter[:, 3:])
    (2 * first + first).sum().backward()
    gradient = holding.parameter.grad
    assert gradient is not None
    assert torch.equal(gradient[:, 3:], torch.full((4, 3, 3), 3.0))
    assert not gradient[:, :3].any()
    holding.clear()
    assert holding.read(part) is not first


def test_parts_of_a_weight_have_gradients_of_their_own_size() -> None:
    whole = (Interval(0, 6),)
    left, right = (Interval(0, 4),), (Interval(3, 6),)
    holding = Holding("w", whole, nn.Parameter(torch.arange(6.0)))
    told: list[torch.Tensor] = []
    holding.watch(told.append)
    for factor in (1.0, 10.0):  # a call of autograd for each region
        (factor * holding.read(left).sum() + 2 * factor * holding.read(right).sum()).backward()
    assert all(holding.read(box).is_leaf and holding.read(box).grad is None for box in (left, right))
    assert holding.parameter.grad is not None
    assert holding.parameter.grad.tolist() == [11.0, 11.0, 11.0, 33.0, 22.0, 22.0]
    assert [each is holding.parameter for each in told] == [True] * 4
    (3 * holding.read(whole)).sum().backward()
    assert holding.gradient(left).tolist() == [14.0, 14.0, 14.0, 36.0]
    assert len(told) == 5


def test_a_part_of_a_weight_that_is_not_trained_has_no_gradient() -> None:
    holding = Holding("w", (Interval(0, 4),), nn.Parameter(torch.ones(4), requires_grad=False))
    assert not holding.read((Interval(1, 3),)).requires_grad
