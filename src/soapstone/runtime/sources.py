"""Where batches come from: each rank asks for the samples that its shards read, or for all of them.

a function with a parameter `rows`      is told which samples of each batch to give
a map-style dataset                     is asked for those samples alone; all ranks agree on the order
any other iterable                      gives whole batches, of which a rank uses its part
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from soapstone.errors import TrainingError
from soapstone.graph import Graph, Role
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.runtime.inputs import Batch
from soapstone.runtime.part import Part, part_shape, sample_axes

Source = Iterable[Any] | Callable[..., Iterable[Any]] | Dataset[Any]


def batches_of(
    source: Source, graph: Graph, rows: Sequence[int], first: int = 0, shuffle_seed: int | None = None
) -> Iterator[Batch | Part]:
    """The batches of a source, of each the given samples; the first so many steps are left out.

    A dataset goes round and round, in its own order or, with a seed, in another one each time.
    """
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return _of_dataset(source, graph, rows, first, shuffle_seed)
    if callable(source) and not isinstance(source, Iterable):
        if "rows" in inspect.signature(source).parameters:
            return (Part(batch) for batch in islice(iter(source(rows=list(rows))), first, None))
        return batches_of(source(), graph, rows, first, shuffle_seed)
    if not isinstance(source, Iterable):
        raise TrainingError(f"batches cannot come from a {type(source).__name__}: give an iterable")
    return islice(iter(source), first, None)


def _of_dataset(
    dataset: Dataset[Any], graph: Graph, rows: Sequence[int], first: int, shuffle_seed: int | None
) -> Iterator[Part]:
    inputs = list(graph.with_role(Role.INPUT))
    samples = graph.sample_count
    axes = sample_axes(graph)
    odd = next((value.name for value in inputs if axes.get(value.name) != 0), None)
    if odd is not None or samples is None:
        raise TrainingError(
            f"a dataset gives samples one by one, and input '{odd}' does not count them along its first axis:"
            " give batches instead"
        )
    size = len(dataset)  # type: ignore[arg-type]  # torch leaves it to each dataset to have a length
    rounds = size // samples
    if not rounds:
        raise TrainingError(f"the dataset has {size} samples and a batch takes {samples}")
    for step in count(first):
        epoch, place = divmod(step, rounds)
        order = _order(size, epoch, shuffle_seed)
        chosen = [order[place * samples + row] for row in rows]
        if chosen:
            yield Part(default_collate([dataset[index] for index in chosen]))
        else:
            yield Part([torch.empty(part_shape(v, 0, 0), dtype=torch_dtype(v.dtype)) for v in inputs])


def _order(size: int, epoch: int, shuffle_seed: int | None) -> Sequence[int]:
    """The order of the samples in a round, the same on every rank."""
    if shuffle_seed is None:
        return range(size)
    generator = torch.Generator().manual_seed(shuffle_seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order
