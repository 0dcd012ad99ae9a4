"""Over which samples batch norms take their statistics: what `--batch-norm` chooses.

    whole   over the whole batch, however it is split: the default
    local   over each shard's own part of it, as DDP does

nn.SyncBatchNorm asks for the whole batch by itself and has it either way.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Node as FxNode

from soapstone.errors import CaptureError
from soapstone.frontends.fxnodes import module_path
from soapstone.graph import Graph
from soapstone.ops import Attr, lookup

WHOLE, LOCAL = "whole", "local"
_SHARDS_OWN: dict[str, Attr] = {"sync": False}


def checked(batch_norm: object, where: str = "") -> str:
    """The choice, if it is one; `where` begins the sentence that refuses others."""
    if batch_norm not in (WHOLE, LOCAL):
        raise CaptureError(
            f"{where}batch_norm is {WHOLE} (statistics of the whole batch) or {LOCAL} (of each shard's own"
            f" samples, as in DDP), not {batch_norm!r}"
        )
    return str(batch_norm)


def local_attrs(op_name: str, node: FxNode, module: nn.Module) -> dict[str, Attr]:
    """What makes a node of the operator take each shard's own statistics; nothing where it takes none, or
    where the module is one that asks for all."""
    if lookup(op_name).statistics is None:
        return {}
    parts = dict(module.named_modules(remove_duplicate=False))
    return {} if isinstance(parts.get(module_path(node)), nn.SyncBatchNorm) else _SHARDS_OWN


def about_local(graph: Graph) -> Iterator[str]:
    """What a user who chose local statistics should know."""
    norms = [node for node in graph.nodes if node.op.statistics is not None]
    kept = [node for node in norms if node.op.joins_statistics(node.attrs)]
    if not norms:
        yield f"the model has no batch norm that trains, so --batch-norm {LOCAL} has nothing to apply to"
    elif kept:
        yield (
            f"{len(kept)} of {len(norms)} batch norms are nn.SyncBatchNorm, which keeps the statistics of the"
            f" {WHOLE} batch under --batch-norm {LOCAL}"
        )
