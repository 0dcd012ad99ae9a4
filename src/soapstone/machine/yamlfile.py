"""Machine files: a machine's document as YAML, loaded safely and written atomically.

Whatever a file holds, reading it either gives a checked `Machine` or raises `MachineError` with one
sentence that names the file and the place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from soapstone.errors import MachineError
from soapstone.files import replace_text
from soapstone.machine.checks import shown
from soapstone.machine.document import document_of, machine_from
from soapstone.machine.machine import Machine

HEADER = "# A machine for Soapstone. The guide on machine files explains every field.\n"


def read_machine(path: Path) -> Machine:
    """The machine that the YAML file at `path` describes."""
    return machine_from(_document_in(path), str(path))


def write_machine(machine: Machine, path: Path) -> None:
    """Write `machine` to `path` so that a reader sees the old file or the new one, never half of it."""
    try:
        replace_text(path, yaml_text(machine))
    except OSError as error:
        raise MachineError(
            f"{path}: the machine file cannot be written ({error.strerror}); choose another place."
        ) from None


def yaml_text(machine: Machine) -> str:
    """The text of the machine's file; equal machines have equal texts."""
    body = yaml.dump(document_of(machine), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=200)
    return HEADER + body


def loaded(text: str) -> object:
    """What YAML text holds; a field that is given twice is a YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506, a SafeLoader


def _document_in(path: Path) -> object:
    try:
        document = loaded(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise MachineError(f"{path}: there is no such machine file; check the path.") from None
    except IsADirectoryError:
        raise MachineError(f"{path}: this is a directory; name the machine file in it.") from None
    except OSError as error:
        raise MachineError(f"{path}: the machine file cannot be read ({error.strerror}); check it.") from None
    except UnicodeDecodeError as error:
        raise MachineError(
            f"{path}: byte {error.start} is not UTF-8 text; give a YAML machine file."
        ) from None
    except yaml.YAMLError as error:
        raise MachineError(f"{path}: {_described(error)}; give a YAML machine file.") from None
    except (ValueError, RecursionError) as error:  # a date that is none, a number too long, nesting too deep
        raise MachineError(f"{path}: this is not YAML of a machine ({error}); correct it.") from None
    if document is None:
        raise MachineError(
            f"{path}: the machine file is empty; start from `soapstone machine show NAME --yaml`."
        )
    return document


def _described(error: yaml.YAMLError) -> str:
    """Where and why the text is not YAML, on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1} is not YAML ({error.problem})"
    return f"this is not YAML text ({' '.join(str(error).split())})"


class _Loader(yaml.SafeLoader):
    """Safe loading that also refuses a field given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field {shown(key)} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes what holds no mapping, such as a device or a link, on one line; and no aliases."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _represent_mapping(dumper: yaml.SafeDumper, mapping: dict[str, object]) -> yaml.MappingNode:
    is_flat = not any(isinstance(value, dict) or _holds_mappings(value) for value in mapping.values())
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping, flow_style=is_flat)


def _represent_list(dumper: yaml.SafeDumper, values: list[object]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=not _holds_mappings(values))


def _holds_mappings(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


_Dumper.add_representer(dict, _represent_mapping)
_Dumper.add_representer(list, _represent_list)
