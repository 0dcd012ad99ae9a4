"""What a checkpoint contains, read without running anything of the file.

torch.distributed.checkpoint pickles its list of tensors into `.metadata`, and unpickling a file runs what
the file says. Here every class that such a list is made of is replaced by a record that only remembers
what it was given, anything else is refused, and the list is built from the records, field by field.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from soapstone.errors import CheckpointError

FILE = ".metadata"
T = TypeVar("T")


class _Record:
    """What an object of the file was made with: `arguments`, and the `state` it had."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str, kind: type[T]) -> T:
        """A field of the object, which must be of a kind."""
        if not isinstance(self.state, dict):
            raise _Unexpected(f"{type(self).__name__} without fields")
        return _as(self.state.get(name), kind)


class _Unexpected(Exception):
    """Something that is not in a checkpoint's list of tensors."""


class _Metadata(_Record):
    pass


class _Index(_Record):
    pass


class _Chunk(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Properties(_Record):
    pass


class _Stored(_Record):
    pass


class _Size(_Record):
    pass


class _Ignored(_Record):
    """What is allowed in the file and not looked at."""


_DCP = "torch.distributed.checkpoint"
_KNOWN: Mapping[tuple[str, str], type[_Record]] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "StorageMeta"): _Ignored,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Ignored,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Stored,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("pathlib", "PosixPath"): _Ignored,
    ("pathlib", "WindowsPath"): _Ignored,
    ("pathlib._local", "PosixPath"): _Ignored,
    ("pathlib._local", "WindowsPath"): _Ignored,
}


class _Records(pickle.Unpickler):
    """Reads records, strings, numbers, lists, tuples, dicts and dtypes; refuses the rest."""

    def find_class(self, module: str, name: str) -> Any:
        """The record that stands for a class."""
        found = _KNOWN.get((module, name))
        if found is not None:
            return found
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Unexpected(f"'{module}.{name}'")


def contents(path: Path) -> Metadata:
    """The list of tensors of the checkpoint in a folder."""
    try:
        with (path / FILE).open("rb") as file:
            return _metadata(_as(_Records(file).load(), _Metadata))
    except _Unexpected as error:
        raise CheckpointError(
            f"{path}: the checkpoint's list of tensors holds {error}, which does not belong there: it is"
            " damaged, or made to run something; nothing of it was run."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: the checkpoint cannot be read ({error.strerror}).") from None
    except Exception as error:  # noqa: BLE001, a damaged pickle may raise anything
        raise CheckpointError(f"{path}: the checkpoint is damaged ({type(error).__name__}).") from None


class ContentsReader(FileSystemReader):
    """Reads the tensors of a checkpoint whose contents are known."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The contents, not read again."""
        return self.known


# -- from records to DCP's own objects --------------------------------------------------------------


def _metadata(record: _Metadata) -> Metadata:
    tensors = {
        _as(name, str): _entry(_as(entry, _Record))
        for name, entry in record.field("state_dict_metadata", dict).items()
    }
    places = {
        _index(_as(index, _Index)): _place(_as(stored, _Stored))
        for index, stored in record.field("storage_data", dict).items()
    }
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _entry(record: _Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Bytes):
        return BytesStorageMetadata()
    tensor = _as(record, _Tensor)
    state = _as(tensor.field("properties", _Properties).state, tuple)
    return TensorStorageMetadata(
        TensorProperties(dtype=_as(state[0] if state else None, torch.dtype)),
        _size(tensor.field("size", _Size)),
        [_chunk(_as(chunk, _Chunk)) for chunk in tensor.field("chunks", list)],
    )


def _chunk(record: _Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_size(record.field("offsets", _Size)), _size(record.field("sizes", _Size)))


def _index(record: _Index) -> MetadataIndex:
    state = _as(record.state, dict)
    offset, place = state.get("offset"), state.get("index")
    return MetadataIndex(
        record.field("fqn", str),
        None if offset is None else _size(_as(offset, _Size)),
        None if place is None else _as(place, int),
    )


def _place(record: _Stored) -> _StorageInfo:
    name = record.field("relative_path", str)
    if Path(name).name != name:
        raise _Unexpected(f"the file name {name!r}")
    return _StorageInfo(name, record.field("offset", int), record.field("length", int))


def _size(record: _Size) -> torch.Size:
    sizes = _as(record.arguments[0] if record.arguments else None, tuple)
    return torch.Size([_as(size, int) for size in sizes])


def _as(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _Unexpected(f"a {type(value).__name__} where a {kind.__name__.strip('_')} is due")
    return value
