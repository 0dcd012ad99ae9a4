"""Machine files: what they may say, and the sentence for each thing they may not."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from soapstone.errors import MachineError
from soapstone.machine import (
    KINDS,
    PRESETS,
    Device,
    Link,
    Machine,
    read_machine,
    resolve,
    write_machine,
    yaml_text,
)
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, Quantity

LAB = """
    soapstone_machine: 1
    name: lab
    kinds:
      mine:
        memory: 24 GiB
        memory_bandwidth: 900 GB/s
        launch_overhead: 5 us
        peak: {f32: 30 TFLOP/s, f16: 120 TFLOP/s}
    nodes:
    - name: node
      count: 2
      devices:
      - {name: gpu, kind: mine, count: 2}
      switches: [host]
      links:
      - {name: pcie, between: [gpu0, host], bandwidth: 16 GB/s, latency: 3 us}
      - {name: bus, between: [gpu1, host], bandwidth: 8e9, latency: 3e-6, duplex: half}
      - {name: eth, between: [host, hub], bandwidth: 10 Gb/s, latency: 25 us}
    - name: big
      devices:
      - {name: fast, kind: h100}
      links:
      - {between: [fast, hub], bandwidth: 100 Gb/s, latency: 0}
    switches: [hub]
    devices:
    - {name: lone, kind: cpu, node: desk}
    links:
    - {name: lan, between: [lone, hub], bandwidth: 1 Gb/s, latency: 1 ms}
    - {name: extra, from: node0/host, to: node1/host, bandwidth: 2 GB/s, latency: 1 us}
"""


def lab(folder: Path, old: str = "", new: str = "") -> Path:
    """The file above with its first `old` replaced by `new`."""
    text = textwrap.dedent(LAB)
    assert old in text
    path = folder / "lab.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def test_a_file_with_everything(tmp_path: Path) -> None:
    machine = read_machine(lab(tmp_path))
    assert [device.name for device in machine.devices] == [
        "node0/gpu0",
        "node0/gpu1",
        "node1/gpu0",
        "node1/gpu1",
        "big/fast",
        "lone",
    ]
    assert machine.nodes == ("node0", "node1", "big", "desk")
    mine = machine.devices[0].kind
    assert mine.memory_bytes == 24 * 2**30
    assert mine.peak_flops_per_s == {"f32": 30e12, "f16": 120e12}
    assert machine.devices[4].kind == KINDS["h100"]
    assert machine.bandwidth(0, 1) == 8e9
    assert machine.narrowest_link(0, 1) == machine.narrowest_link(1, 0)
    assert machine.bandwidth(0, 2) == 2e9  # over the extra one-way link
    assert machine.bandwidth(2, 0) == 1.25e9
    assert machine.bandwidth(4, 5) == 0.125e9
    assert machine.latency(4, 5) == 1e-3
    assert "big/fast-hub>" in machine.link_numbers


def test_resolve_reads_files(tmp_path: Path) -> None:
    path = lab(tmp_path)
    assert resolve(str(path)) == read_machine(path)
    path.rename(tmp_path / "lab.yml")
    assert resolve(str(tmp_path / "lab.yml")).name == "lab"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_by_nodes_and_read_back(name: str, tmp_path: Path) -> None:
    for size in ("", ":1x1", ":3x2"):
        machine = resolve(f"{name}{size}")
        path = tmp_path / "m.yaml"
        write_machine(machine, path)
        assert read_machine(path) == machine
    assert yaml_text(resolve(f"{name}:3x2")).count("kind:") == 1


def test_the_text_of_a_small_machine() -> None:
    assert yaml_text(resolve("a100:2x1")) == textwrap.dedent(
        """\
        # A machine for Soapstone. The guide on machine files explains every field.
        soapstone_machine: 1
        name: a100:2x1
        nodes:
        - name: node
          count: 2
          devices:
          - {name: gpu0, kind: a100}
          switches: [nvswitch]
          links:
          - {name: ib-0, between: [gpu0, fabric], bandwidth: 25 GB/s, latency: 4.8 us}
          - {name: nvlink-0, between: [gpu0, nvswitch], bandwidth: 300 GB/s, latency: 1.7 us}
        switches: [fabric]
        """
    )


def test_a_machine_whose_names_do_not_start_with_their_node_is_written_device_by_device(
    tmp_path: Path,
) -> None:
    placed = tuple(Device(index, f"gpu{index}", KINDS["p100"], "box") for index in range(3))
    links = tuple(Link(f"l{i}", f"gpu{i}", "sw", 1e9, 1e-6, both_ways=True) for i in range(3))
    machine = Machine("flat", placed, links, ("sw",))
    assert "devices:\n- {name: gpu, kind: p100, count: 3, node: box}\n" in yaml_text(machine)
    assert read_machine(written(machine, tmp_path)) == machine


def written(machine: Machine, folder: Path) -> Path:
    path = folder / "written.yaml"
    write_machine(machine, path)
    return path


def test_writing_replaces_the_file_at_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("old", encoding="utf-8")
    write_machine(resolve("cpu"), path)
    assert read_machine(path) == resolve("cpu")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.yaml"]


def test_a_failed_write_keeps_the_old_file_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "taken.yaml").mkdir()
    with pytest.raises(
        MachineError, match=r"taken\.yaml: the machine file cannot be written \(Is a directory\)"
    ):
        write_machine(resolve("cpu"), tmp_path / "taken.yaml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken.yaml"]
    with pytest.raises(MachineError, match=r"cannot be written \(No such file or directory\)"):
        write_machine(resolve("cpu"), tmp_path / "nowhere" / "m.yaml")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    with pytest.raises(MachineError, match=r"cannot be written \(Not a directory\)"):
        write_machine(resolve("cpu"), tmp_path / "file" / "m.yaml")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


def test_the_example_in_the_guide_is_a_machine_file(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "machine-files.md"
    example, kind = re.findall(r"```yaml\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "lab.yaml"
    path.write_text(f"{example}\n{kind}", encoding="utf-8")
    machine = read_machine(path)
    assert [device.name for device in machine.devices][:3] == ["node0/gpu0", "node0/gpu1", "node1/gpu0"]
    assert machine.bandwidth(0, 1) == 50e9
    assert machine.bandwidth(0, 7) == 12.5e9


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("soapstone_machine: 1", "", "the document lacks the field 'soapstone_machine'; add it."),
        ("soapstone_machine: 1", "soapstone_machine: 2", "soapstone_machine is 2, but this Soapstone reads"),
        ("soapstone_machine: 1", "soapstone_machine: true", "soapstone_machine is True, but"),
        ("name: lab", "", "the document lacks the field 'name'"),
        ("name: lab", "name: 7", "name must be text, not 7; put it in quotes."),
        ("name: lab", "name: ''", "name is '', which is not printable text"),
        ("name: lab", "nam: lab", "the document has the unknown field 'nam'; did you mean 'name'?"),
        (
            "name: lab",
            "name: lab\nname: lab2",
            "line 4, column 1 is not YAML (the field 'name' is given twice)",
        ),
        ("name: lab", "name: lab\n7: x", "the document has the field 7, which is not text"),
        ("    memory: 24 GiB\n", "", "kinds.mine lacks the field 'memory'"),
        (
            "24 GiB",
            "24 GB/s",
            "kinds.mine.memory is '24 GB/s', which is not an amount of memory; write a number",
        ),
        ("24 GiB", "0.1 B", "kinds.mine.memory is '0.1 B', less than a byte"),
        ("900 GB/s", "-900 GB/s", "kinds.mine.memory_bandwidth must be more than 0, not '-900 GB/s'"),
        (
            "launch_overhead: 5 us",
            "launch_overhead: -1",
            "kinds.mine.launch_overhead must be 0 or more, not -1",
        ),
        (
            "launch_overhead: 5 us",
            "launch_overhead: 5 us\n    message_overhead: 1 GB",
            "kinds.mine.message_overhead is '1 GB', which is not a time",
        ),
        ("f32: 30 TFLOP/s, ", "", "kinds.mine.peak lacks the field 'f32'"),
        ("f16: 120", "fp16: 120", "kinds.mine.peak has the unknown field 'fp16'; did you mean 'f16'?"),
        ("{f32: 30 TFLOP/s, f16: 120 TFLOP/s}", "30", "kinds.mine.peak must be a mapping of fields, not 30"),
        ("  mine:", "  my gpu:", "kinds.my gpu is 'my gpu', but a name has no blanks"),
        ("count: 2", "count: 0", "nodes[0].count must be a whole number from 1 to 65536, not 0"),
        ("count: 2", "count: 1.5", "nodes[0].count must be a whole number from 1 to 65536, not 1.5"),
        ("count: 2", "count: 9999999", "nodes[0].count must be a whole number from 1 to 65536, not 9999999"),
        ("count: 2", "conut: 2", "nodes[0] has the unknown field 'conut'; did you mean 'count'?"),
        (
            "kind: mine",
            "kind: mime",
            "nodes[0].devices[0].kind is the unknown device kind 'mime'; did you mean",
        ),
        ("kind: mine", "kind: [mine]", "nodes[0].devices[0].kind must be text, not ['mine']"),
        ("kind: h100", "kind: zebra", "the unknown device kind 'zebra'; choose one of k80, p100, v100, a100"),
        ("name: gpu, kind: mine, ", "name: gpu, ", "nodes[0].devices[0] lacks the field 'kind'"),
        ("switches: [host]", "switches: host", "nodes[0].switches must be a list, not 'host'"),
        (
            "switches: [host]",
            "switches: [host, host]",
            "nodes[0].switches[1] gives the name 'host', which nodes[0]",
        ),
        (
            "switches: [host]",
            "switches: [gpu1]",
            "[0] gives the name 'gpu1', which nodes[0].devices[0].name has",
        ),
        ("switches: [host]", "switches: [a b]", "nodes[0].switches[0] is 'a b', but a name has no blanks"),
        ("name: big", "name: node1", "nodes[1].name gives the name 'node1', which nodes[0].name has already"),
        (
            "name: bus",
            "name: pcie",
            "nodes[0].links[1].name gives the name 'pcie', which nodes[0].links[0].name",
        ),
        (
            "16 GB/s",
            "0",
            "nodes[0].links[0].bandwidth must be more than 0, not 0; write a number of bytes per",
        ),
        ("16 GB/s", "-1 GB/s", "nodes[0].links[0].bandwidth must be more than 0, not '-1 GB/s'"),
        ("16 GB/s", "16 Gigs", "nodes[0].links[0].bandwidth is '16 Gigs', which is not a bandwidth; write"),
        ("16 GB/s", ".nan", "nodes[0].links[0].bandwidth is nan, which is not a bandwidth"),
        ("16 GB/s", ".inf", "nodes[0].links[0].bandwidth is inf, which is not a bandwidth"),
        ("16 GB/s", "1e999", "nodes[0].links[0].bandwidth is '1e999', which is too large"),
        ("16 GB/s", "1e-999", "nodes[0].links[0].bandwidth must be more than 0, not '1e-999'"),
        ("16 GB/s", "true", "nodes[0].links[0].bandwidth is True, which is not a bandwidth"),
        ("16 GB/s", "[1, 2]", "nodes[0].links[0].bandwidth is [1, 2], which is not a bandwidth"),
        ("16 GB/s", "", "nodes[0].links[0].bandwidth is None, which is not a bandwidth"),
        ("latency: 25 us", "latency: -25 us", "nodes[0].links[2].latency must be 0 or more, not '-25 us'"),
        (", latency: 25 us", "", "nodes[0].links[2] lacks the field 'latency'"),
        (
            "duplex: half",
            "duplex: quarter",
            "nodes[0].links[1] has the duplex 'quarter'; write 'full' or 'half'.",
        ),
        (
            "between: [gpu0, host]",
            "between: [gpu0]",
            "nodes[0].links[0].between has 1 ends, but a link has 2",
        ),
        (
            "between: [gpu0, host]",
            "between: [gpu0, gpu0]",
            "links[0].between[1] is 'gpu0' like the other end",
        ),
        (
            "between: [gpu0, host]",
            "between: [gpu0, hots]",
            "between[1] is 'hots', no device and no switch; did you",
        ),
        ("between: [gpu0, host]", "from: gpu0", "nodes[0].links[0] must have either 'between: [A, B]' or"),
        ("between: [gpu0, host]", "between: [gpu0, host], to: host", "nodes[0].links[0] must have either"),
        ("to: node1/host", "to: node1/host, duplex: half", "links[1] must have either 'between: [A, B]' or"),
        ("node0/host", "node2/host", "links[1].from is 'node2/host', no device and no switch; did you mean"),
        ("  - {name: eth,", "  - {name: eth, mtu: 9000,", "nodes[0].links[2] has the unknown field 'mtu'"),
        (
            "- {name: lan, between: [lone, hub], bandwidth: 1 Gb/s, latency: 1 ms}",
            "",
            "there is no route from device",
        ),
        ("node: desk", "nodes: desk", "devices[0] has the unknown field 'nodes'; did you mean 'node'?"),
        ("name: lone", "name: hub", "devices[0].name gives the name 'hub', which switches[0] has already"),
        (
            "name: lone",
            "name: node0/gpu0",
            "devices[0].name gives the name 'node0/gpu0', which nodes[0] has already",
        ),
        ("name: lab", "name: [", "is not YAML"),
        (
            "name: lab",
            "name: !!python/object/apply:os.getcwd []",
            "is not YAML (could not determine a constructor",
        ),
        ("name: lab", "name: 2024-99-99", "this is not YAML of a machine"),
    ],
)
def test_a_faulty_file_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = lab(tmp_path, old, new)
    with pytest.raises(MachineError, match=re.escape(sentence)) as refusal:
        read_machine(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the machine file is empty; start from"),
        (b"# nothing but a comment\n", "the machine file is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "byte 0 is not UTF-8 text; give a YAML machine file."),
        (b"\x00\x01\x02", "this is not YAML text (unacceptable character"),
        (b"just words\n", "the document must be a mapping of fields, not 'just words'"),
        (b"- a\n- b\n", "the document must be a mapping of fields, not ['a', 'b']"),
        (b"[" * 5000, "this is not YAML of a machine (maximum recursion depth exceeded"),
        (b"a: &a [*a]\n", "the document has the unknown field 'a'"),
        (b"x: " + b"9" * 5000, "this is not YAML of a machine"),
        (b"soapstone_machine: 1\nname: m\n", "machine 'm': there are no devices"),
        (b"soapstone_machine: 1\nname: m\n--- \nname: n\n", "is not YAML (but found another document)"),
    ],
)
def test_what_is_no_machine_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    with pytest.raises(MachineError, match=re.escape(sentence)) as refusal:
        read_machine(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no\.yaml: there is no such machine file; check the path\."):
        read_machine(tmp_path / "no.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(
        MachineError, match=r"folder\.yaml: this is a directory; name the machine file in it\."
    ):
        read_machine(tmp_path / "folder.yaml")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(MachineError, match=r"cannot be read \(Not a directory\)"):
        read_machine(tmp_path / "file" / "m.yaml")


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (BYTES_PER_S, "12 GB/s", 12e9),
        (BYTES_PER_S, "100 Gb/s", 12.5e9),
        (BYTES_PER_S, "100Gbit/s", 12.5e9),
        (BYTES_PER_S, "1 GiB/s", 2**30),
        (BYTES_PER_S, " 3.5e2 MB/s ", 350e6),
        (BYTES_PER_S, "7e9", 7e9),
        (BYTES_PER_S, 7, 7.0),
        (SECONDS, "1.5 us", 1.5e-6),
        (SECONDS, "1.5 µs", 1.5e-6),
        (SECONDS, ".5 ms", 0.5e-3),
        (SECONDS, "0.1", 0.1),
        (BYTES, "16 GiB", 16 * 2**30),
        (BYTES, "16 GB", 16e9),
        (BYTES, "1 kB", 1000),
        (FLOPS_PER_S, "15.7 TFLOP/s", 15.7e12),
    ],
)
def test_units(quantity: Quantity, text: object, value: float) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize(
    "text", ["12 gb/s", "GB/s", "12 GB", "1,5 GB/s", "1e9999999999 GB/s", "9" * 50, "", "٣ GB/s"]
)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match="which is not a bandwidth; write a number of bytes per second or"):
        BYTES_PER_S.parse(text)


def test_how_sums_are_made_is_said_in_a_word(tmp_path: Path) -> None:
    assert read_machine(lab(tmp_path)).sums == "ring"
    through_one = read_machine(lab(tmp_path, "name: lab", "name: lab\nsums: one_device"))
    assert through_one.sums == "one_device"
    assert through_one != read_machine(lab(tmp_path))
    with pytest.raises(MachineError, match="sums are 'tree'; choose one of ring, one_device"):
        read_machine(lab(tmp_path, "name: lab", "name: lab\nsums: tree"))
    with pytest.raises(MachineError) as refused:
        read_machine(lab(tmp_path, "name: lab", "name: lab\nsums: [ring]"))
    assert str(refused.value).count(str(tmp_path)) == 1
