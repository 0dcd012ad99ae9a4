"""A cluster: devices, links, and the route between every two devices (FlexFlow 3, the device topology).

`resolve` turns what a user types into a `Machine`; `machine.py` says what one is.
"""

from __future__ import annotations

from pathlib import Path

from soapstone.errors import MachineError
from soapstone.machine.device import DTYPES, KINDS, DeviceKind
from soapstone.machine.document import document_of, machine_from
from soapstone.machine.machine import Device, Link, Machine, full_duplex
from soapstone.machine.node import NodeTemplate, assembled
from soapstone.machine.presets import PRESETS, Preset, preset
from soapstone.machine.yamlfile import read_machine, write_machine, yaml_text

__all__ = [
    "DTYPES",
    "KINDS",
    "PRESETS",
    "Device",
    "DeviceKind",
    "Link",
    "Machine",
    "NodeTemplate",
    "Preset",
    "assembled",
    "document_of",
    "full_duplex",
    "machine_from",
    "preset",
    "read_machine",
    "resolve",
    "write_machine",
    "yaml_text",
]


def resolve(text: str) -> Machine:
    """The machine a user means: `NAME`, `NAME:NODESxDEVICES`, or the path of a .yaml or .yml file."""
    if text.lower().endswith((".yaml", ".yml")):
        return read_machine(Path(text))
    if "/" in text:
        raise MachineError(f"the machine file {text!r} does not end in .yaml or .yml; rename it.")
    return preset(text)
