"""Baselines: strategies that people, and other planners, would use. `docs/guide/baselines.md` is the
user's page.

    simple        data parallel, model parallel, one device, random
    krizhevsky, wu, megatron, dlrm_expert
                  what experts do for convolutional, recurrent, transformer and recommendation models
    optcnn        dynamic programming over a sum of costs: layers, part_costs, elimination
    zero          data parallelism with weights stored in shares
    taso_then_flexflow   rewriting first, then parallelizing
    colocrl       placement of whole blocks, learned by reinforcement
    pipeline      micro-batches through stages, cut by dynamic programming
    anatomy       what part of a network a block is
    registry      all of them by name
"""

from soapstone.search.baselines.registry import BASELINES, Baseline, applicable, baseline
from soapstone.search.baselines.simple import data_parallel, model_parallel, single_device

__all__ = [
    "BASELINES",
    "Baseline",
    "applicable",
    "baseline",
    "data_parallel",
    "model_parallel",
    "single_device",
]
