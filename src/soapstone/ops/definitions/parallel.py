"""Parallel operators (Unity 3.3): they change how a value is laid out over devices, not the value.

Partition and Combine change the degree of an axis, Replicate and Reduce the number of copies and of
partial sums, Pipeline and Batch into how many pieces an axis is cut in time; each pair is the backward
of the other. Their meaning on elements is the identity; what they do to a layout says `subst.layout`.
"""

from __future__ import annotations

from soapstone.ops.definitions.axes import keeps
from soapstone.ops.examples import example
from soapstone.ops.op import Attrs, Op
from soapstone.ops.registry import register


def _parallel(name: str, attrs: Attrs) -> Op:
    return register(
        Op(
            name,
            "... -> ...",
            body=keeps,
            torch=keeps,
            attrs=attrs,
            flops=0,
            is_view=True,
            examples=(example((4, 6)), example((2, 4, 6), **attrs)),
        )
    )


partition = _parallel("partition", {"dim": 0, "degree": 2})
combine = _parallel("combine", {"dim": 0, "degree": 2})
replicate = _parallel("replicate", {"degree": 2})
reduce = _parallel("reduce", {"degree": 2})
pipeline = _parallel("pipeline", {"dim": 0, "degree": 2})
batch = _parallel("batch", {"dim": 0, "degree": 2})
