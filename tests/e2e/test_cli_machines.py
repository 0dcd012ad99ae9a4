"""`soapstone machines` and `soapstone machine show`, from arguments to exit code and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles.shell import Soapstone

from soapstone.machine import PRESETS, read_machine, resolve, yaml_text


def test_machines_lists_every_preset(soapstone: Soapstone) -> None:
    code, out, err = soapstone("machines")
    assert (code, err) == (0, "")
    for preset in PRESETS.values():
        assert preset.default_name in out
    assert "192 v100" in out
    assert "141 GiB" in out


def test_machines_as_json(soapstone: Soapstone) -> None:
    code, out, err = soapstone("machines", "--json")
    assert (code, err) == (0, "")
    listed = {entry["name"]: entry for entry in json.loads(out)["machines"]}
    assert list(listed) == list(PRESETS)
    assert listed["p100"]["default"] == "p100:4x4"
    assert listed["p100"]["devices"] == 16
    assert listed["p100"]["kind"]["peak_flops_per_s"]["f32"] == 10.6e12


def test_show_prints_every_pair_of_a_small_machine(soapstone: Soapstone) -> None:
    code, out, err = soapstone("machine", "show", "k80:1x4")
    assert (code, err) == (0, "")
    assert "k80:1x4: 4 devices on 1 node, 15 links" in out
    rows = out[out.index("bandwidth in GB/s") :].splitlines()
    assert rows[2].split() == ["0", "-", "15.75", "7.875", "7.875"]
    assert rows[5].split() == ["3", "7.875", "7.875", "15.75", "-"]
    rows = out[out.index("latency in us") :].splitlines()
    assert rows[2].split() == ["0", "-", "5.7", "6", "6"]


def test_show_counts_the_pairs_of_a_large_machine(soapstone: Soapstone) -> None:
    code, out, _ = soapstone("machine", "show", "summit")
    assert code == 0
    assert "summit:32x6: 192 devices on 32 nodes, 960 links" in out
    assert "node0 to node31" in out
    assert "bandwidth in GB/s" not in out
    cells = [line.split() for line in out.splitlines()]
    assert ["384", "50", "GB/s", "3.4", "us", "in", "a", "node"] in [row[:8] for row in cells]
    assert ["576", "32", "GB/s", "3.9", "us", "in", "a", "node"] in [row[:8] for row in cells]
    assert ["35712", "12.5", "GB/s", "7.3", "us", "between", "nodes", "ib"] in [row[:8] for row in cells]
    assert max(map(len, out.splitlines())) <= 100


def test_show_all_prints_everything(soapstone: Soapstone) -> None:
    _, out, _ = soapstone("machine", "show", "k80:6x4", "--all")
    assert "node5/gpu3" in out
    assert "node5/pcie-shared" in out
    matrix = out[out.index("bandwidth in GB/s") : out.index("latency in us")].strip().splitlines()
    assert len(matrix) == 2 + 24
    assert len(matrix[-1].split()) == 1 + 24


def test_show_of_one_device(soapstone: Soapstone) -> None:
    code, out, _ = soapstone("machine", "show", "h200:1x1")
    assert code == 0
    assert "1 device on 1 node" in out
    assert "latency in us" not in out


def test_show_as_json(soapstone: Soapstone) -> None:
    code, out, err = soapstone("machine", "show", "p100:2x2", "--json")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    machine = resolve("p100:2x2")
    assert [device["name"] for device in shown["devices"]] == [device.name for device in machine.devices]
    assert [link["name"] for link in shown["links"]] == [link.name for link in machine.links]
    assert shown["bandwidth_bytes_per_s"][0] == [None, 20e9, 12.5e9, 12.5e9]
    assert shown["latency_s"][0][1] == 3.4e-6
    assert shown["narrowest_link"][3][0] == "node1/ib>"


def test_show_as_yaml_is_a_machine_file(soapstone: Soapstone, tmp_path: Path) -> None:
    _, out, _ = soapstone("machine", "show", "summit:2x6", "--yaml")
    assert out == yaml_text(resolve("summit:2x6"))
    path = tmp_path / "mine.yaml"
    path.write_text(out, encoding="utf-8")
    assert read_machine(path) == resolve("summit:2x6")
    code, again, _ = soapstone("machine", "show", str(path), "--yaml")
    assert (code, again) == (0, out)


def test_brackets_in_names_are_shown_as_they_are(soapstone: Soapstone, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "soapstone_machine: 1\nname: '[bold]lab'\ndevices:\n- {name: 'gpu[red]', kind: cpu, node: a}\n",
        encoding="utf-8",
    )
    _, out, _ = soapstone("machine", "show", str(path))
    assert "[bold]lab: 1 device" in out
    assert "gpu[red]" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "h20"], "soapstone: there is no machine 'h20'"),
        (["show", "p100:4x99"], "soapstone: machine 'p100:4x99': 99 devices per node is outside 1 to 8"),
        (["show", "missing.yaml"], "soapstone: missing.yaml: there is no such machine file; check the path."),
        (["show", "p100", "--json", "--yaml"], "--json and --yaml exclude each other"),
        (["show"], "Missing argument"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_sentence(
    soapstone: Soapstone, arguments: list[str], sentence: str
) -> None:
    code, out, err = soapstone("machine", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["machines"], ["machine", "show"]])
def test_help_has_examples(soapstone: Soapstone, arguments: list[str]) -> None:
    code, out, _ = soapstone(*arguments, "--help")
    assert code == 0
    assert "Examples:" in out
    assert "soapstone machine show" in out
