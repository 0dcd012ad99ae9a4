"""The operators, a file for each family. Importing this package registers them all."""

import importlib

FAMILIES = (
    "linear",
    "opaque",
    "elementwise",
    "activation",
    "reduction",
    "shape",
    "slicing",
    "indexing",
    "generation",
    "convolution",
    "kernels",
    "pooling",
    "normalization",
    "loss",
    "recurrent",
    "dropout",
    "attention",
    "embedding",
    "parallel",
)

for family in FAMILIES:
    importlib.import_module(f"soapstone.ops.definitions.{family}")
