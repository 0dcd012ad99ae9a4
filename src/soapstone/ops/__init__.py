"""Operators: what each one is, and everything that follows from it.

Import the operators themselves from here; importing this package registers all of them and does
not import torch.
"""

from soapstone.ops import definitions as definitions
from soapstone.ops.box import Box, Interval
from soapstone.ops.op import Attr, Attrs, Call, Op, Shard, Statistics
from soapstone.ops.registry import all_ops, claimants, lookup, register
from soapstone.ops.signature import Affine, Kind, Region, Shape, Signature

__all__ = [
    "Affine",
    "Attr",
    "Attrs",
    "Box",
    "Call",
    "Interval",
    "Kind",
    "Op",
    "Region",
    "Shape",
    "Shard",
    "Signature",
    "Statistics",
    "all_ops",
    "claimants",
    "lookup",
    "register",
]
