"""The operators, a file for each family. Importing this package registers them all."""

import importlib

FAMILIES = (
    "linear",
    "opaque",
    "elementwise",
    "convolution",
)

for family in FAMILIES:
    importlib.import_module(f"soapstone.ops.definitions.{family}")
