"""Tensors of which a rank has some boxes, as torch.distributed.checkpoint writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from soapstone.errors import CheckpointError
from soapstone.ops.box import Box, shape_of


class Boxed:
    """A tensor of which this rank has some boxes."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[Box, Tensor]) -> None:
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, dict(parts)

    def size(self) -> torch.Size:
        """The shape of all of it."""
        return self.shape

    def part(self, index: MetadataIndex) -> Tensor:
        """The box that starts there."""
        return next(tensor for box, tensor in self.parts.items() if _offsets(box) == index.offset)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """An item for each box."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the boxes are."""
        return [ChunkStorageMetadata(_offsets(box), torch.Size(shape_of(box))) for box in self.parts]


def _offsets(box: Box) -> torch.Size:
    return torch.Size([interval.lo for interval in box])


class BoxSaver(DefaultSavePlanner):
    """Finds the boxes that are to be written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor at an index."""
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, Boxed) else super().lookup_object(index)


class BoxLoader(DefaultLoadPlanner):
    """Finds the boxes that are to be filled. The state is one flat dict, taken as it is: torch's own
    planner would go through it and drop what it does not know."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state to be filled."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Refuse what is no tensor: torch's own planner would unpickle it."""
        del value
        raise CheckpointError(f"the checkpoint's '{read_item.dest_index.fqn}' is no tensor.")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor at an index."""
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, Boxed) else super().lookup_tensor(index)
