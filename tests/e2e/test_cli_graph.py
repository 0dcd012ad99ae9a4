"""`soapstone graph`: models of the zoo and of a person's own files, good and bad."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from soapstone.cli.main import main
from soapstone.frontends.source import load
from soapstone.graph import Graph, Role, from_document, parsed

Output = pytest.CaptureFixture[str]
Write = Callable[..., str]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, image):
        return self.fc(image)

def make():
    return Net(), torch.randn(8, 6)
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a Python file; its path."""

    def written(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(dedent(text), encoding="utf-8")
        return str(tmp_path / name)

    return written


def succeeded(capsys: Output, *arguments: str) -> tuple[str, str]:
    """What the command prints on standard output and standard error."""
    code = main(["graph", *arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out, printed.err


def refused(capsys: Output, *arguments: str) -> str:
    """The one sentence with which the command ends; exit code 2, nothing on standard output."""
    assert main(["graph", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("soapstone: ")
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1, printed.err
    assert "Traceback" not in printed.err
    return printed.err[len("soapstone: ") : -1]


def captured(capsys: Output, *arguments: str) -> Graph:
    out, err = succeeded(capsys, *arguments, "--json")
    assert err == ""
    return from_document(json.loads(out))


# -- the zoo -----------------------------------------------------------------------------------------


def test_text_reads_back(capsys: Output) -> None:
    out, err = succeeded(capsys, "lenet", "--tiny")
    assert err == ""
    assert out.startswith("# lenet: 2.63k parameters, 15 nodes, 335kflop forward, 4 samples a step\n")
    assert parsed(out) == captured(capsys, "lenet:tiny")


def test_json_holds_what_follows_from_the_graph(capsys: Output) -> None:
    out, _ = succeeded(capsys, "lenet", "--tiny", "--json")
    document = json.loads(out)
    assert document["parameters"] == 2632
    assert document["samples"] == 4
    assert document["notes"] == []
    first = document["nodes"][0]
    assert first["op"] == "conv2d"
    assert first["kinds"]["b"] == "sample"
    assert first["flops"] > 0


def test_summary_counts_operators(capsys: Output) -> None:
    out, _ = succeeded(capsys, "lenet", "--tiny", "--summary")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["linear"][1] == "3"
    assert "o: parameter" in " ".join(rows["linear"])
    assert "%" not in out


def test_options(capsys: Output) -> None:
    graph = captured(capsys, "rnnlm:tiny,steps=2")
    assert sum(node.op_name == "lstm_cell" for node in graph.nodes) == 4
    graph = captured(capsys, "lenet:channels=(4, 8),hidden=[16,12],tiny", "--batch", "6")
    assert graph.sample_count == 6
    assert graph.value("fc2.weight").shape == (12, 16)


def test_a_huge_batch_takes_no_memory(capsys: Output) -> None:
    assert captured(capsys, "lenet", "--batch", "2000000000").sample_count == 2_000_000_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lenett"], "there is no built-in model 'lenett'; did you mean lenet"),
        ([""], "'' is not a model: write a zoo name, hf:CONFIG, or path/to/file.py:function"),
        (["rnnlm:step=2"], "rnnlm has no option 'step'; did you mean steps?"),
        (["rnnlm:steps=many"], "option steps of rnnlm cannot be 'many'; it is 40 by default"),
        (["rnnlm:steps=-2"], "option steps of rnnlm cannot be -2"),
        (["rnnlm:steps=2,steps=3"], "gives the option 'steps' twice"),
        (["rnnlm:=2"], "options are written as name=value, not '=2'"),
        (["mlp:hidden=99999999999999999999999"], "model 'mlp' cannot be made with a batch of 256 and these"),
        (["lenet", "--batch", "0"], "a batch has at least one sample and at most 2,147,483,647, not 0"),
        (["lenet", "--batch", "-3"], "a batch has at least one sample"),
        (["lenet", "--batch", "99999999999999999999999"], "a batch has at least one sample and at most"),
        (["lenet", "--batch", "many"], "Invalid value for '--batch'"),
        (["lenet", "--loss", "mse"], "model 'lenet' of the zoo brings its own loss: leave out --loss"),
        (["lenet", "--length", "8"], "--length is for Hugging Face models, and 'lenet' is none"),
        (["lenet", "--summary", "--json"], "--summary is for reading: leave out --json and --output"),
        (["lenet", "--tiny", "-o", "."], ". is not a place for a file; name one in a directory that exists"),
        (["lenet", "--tiny", "-o", "no/such/place.txt"], "no/such/place.txt is not a place for a file"),
        (["hf:no/such"], "there is no Hugging Face configuration at no/such"),
        (["no/such.py:make"], "there is no file no/such.py"),
        (["such.py"], "'such.py' names a file but no function in it: write such.py:function"),
        ([], "Missing argument 'MODEL'"),
        (["lenet", "alexnet"], "unexpected extra argument"),
    ],
)
def test_refused(arguments: list[str], sentence: str, capsys: Output) -> None:
    assert sentence in refused(capsys, *arguments)


@pytest.mark.parametrize("name", ["graph.json", "graph.txt"])
def test_output_file(name: str, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / name
    assert succeeded(capsys, "lenet", "--tiny", "-o", str(path)) == ("", "")
    text = path.read_text(encoding="utf-8")
    read = from_document(json.loads(text)) if name.endswith(".json") else parsed(text)
    assert read == captured(capsys, "lenet", "--tiny")
    assert list(tmp_path.iterdir()) == [path]


def test_output_file_stays_when_the_model_is_refused(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("before", encoding="utf-8")
    refused(capsys, "lenett", "-o", str(path))
    assert path.read_text(encoding="utf-8") == "before"


# -- a person's own file -----------------------------------------------------------------------------


def test_outputs_without_a_loss_are_noted(write: Write, capsys: Output) -> None:
    out, err = succeeded(capsys, f"{write(MODEL)}:make")
    assert out.startswith("# mine: 28 parameters, 1 nodes, 416flop forward, 8 samples a step, 1 note\n")
    assert 'weight %fc.weight: f32[4, 6] from "fc.weight"' in out
    assert "input %image: f32[8, 6] samples=0" in out
    assert err == (
        "soapstone: note: the model returns no loss, so it cannot be trained: let it return one, or add one"
        " with --loss\n"
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_added_loss(loss: str, write: Write, capsys: Output) -> None:
    graph = captured(capsys, f"{write(MODEL)}:make", "--loss", loss)
    assert graph.loss is not None
    target = graph.value("target")
    assert target.role is Role.INPUT
    assert target.shape == ((8,) if loss == "cross_entropy" else (8, 4))


@pytest.mark.parametrize(
    ("returned", "inputs"),
    [
        ("Net(), torch.randn(8, 6), 'cross_entropy'", ["image", "target"]),
        ("Net(), (torch.randn(8, 6), torch.randn(8, 4)), nn.functional.mse_loss", ["image", "target"]),
        ("Net(), (torch.randn(8, 6), torch.randn(8, 4)), 'mse'", ["image", "target"]),
        ("[Net(), [torch.randn(8, 6), torch.zeros(8).long()], nn.CrossEntropyLoss()]", ["image", "target"]),
        ("Net(), {'image': torch.randn(8, 6), 'y': torch.randn(8, 4)}, nn.MSELoss()", ["image", "y"]),
        ("Net(), {'image': torch.randn(8, 6)}, 'mse'", ["image", "target"]),
        ("Net(), torch.randn(8, 6), lambda output, target: output.sum()", None),
        ("torch.compile(Net()), torch.randn(8, 6), 'mse'", ["image", "target"]),
        ("Net().eval(), torch.randn(8, 6), 'mse'", ["image", "target"]),
    ],
)
def test_what_a_function_may_return(
    returned: str, inputs: list[str] | None, write: Write, capsys: Output
) -> None:
    path = write(f"{MODEL}\ndef given():\n    return {returned}\n")
    if inputs is None:
        assert "its loss function needs a target" in refused(capsys, f"{path}:given")
        return
    graph = captured(capsys, f"{path}:given")
    assert graph.loss is not None
    assert [value.name for value in graph.with_role(Role.INPUT)] == inputs
    assert [value.name for value in graph.with_role(Role.WEIGHT)] == ["fc.weight", "fc.bias"]
    assert graph.sample_count == 8


@pytest.mark.parametrize(
    "output",
    [
        "loss",
        "(logits, loss)",
        "{'logits': logits, 'loss': loss}",
        "Out(logits, loss)",
        "Plain(logits, loss)",
    ],
)
def test_the_models_own_loss_is_found(output: str, write: Write, capsys: Output) -> None:
    path = write(
        f"""
        import dataclasses, torch
        from torch import nn

        @dataclasses.dataclass
        class Out:
            logits: torch.Tensor
            loss: torch.Tensor | None = None

        class Plain:
            def __init__(self, logits, loss):
                self.logits, self.loss = logits, loss

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(6, 4)

            def forward(self, x, y):
                logits = self.fc(x)
                loss = nn.functional.cross_entropy(logits, y)
                return {output}

        def make(batch=8):
            return Net(), (torch.randn(batch, 6), torch.zeros(batch, dtype=torch.int64))
        """
    )
    graph = captured(capsys, f"{path}:make", "--batch", "12")
    assert graph.loss is not None
    assert graph.outputs == ()
    assert graph.sample_count == 12


def test_batch_that_is_not_the_first_axis(write: Write, capsys: Output) -> None:
    """`batch` says how many samples there are, so their axis is found wherever it is."""
    path = write(
        """
        import torch
        from torch import nn

        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm, self.fc = nn.LSTM(6, 5), nn.Linear(5, 3)

            def forward(self, words, tags):
                return nn.functional.cross_entropy(self.fc(self.lstm(words)[0]).flatten(0, 1), tags.flatten())

        def make(batch=4):
            return Tagger(), (torch.randn(7, batch, 6), torch.zeros(7, batch, dtype=torch.int64))
        """
    )
    for arguments, count in ((), 4), (("--batch", "10"), 10):
        graph = captured(capsys, f"{path}:make", *arguments)
        assert graph.sample_count == count
        assert [value.samples for value in graph.with_role(Role.INPUT)] == [1, 1]


def test_what_a_person_prints_is_kept_off_standard_output(write: Write, capsys: Output) -> None:
    text = MODEL.replace("return self.fc(image)", "print('forward'); return self.fc(image).sum()")
    out, err = succeeded(capsys, f"{write('print(1)' + text)}:make", "--json")
    assert json.loads(out)["loss"] is not None
    assert set(err.split()) == {"1", "forward"}


def test_files_beside_it_can_be_imported(write: Write, capsys: Output, tmp_path: Path) -> None:
    """Also late, by the function; and nothing is written there."""
    write(MODEL, "parts.py")
    path = write("import parts\ndef make():\n    import parts as late\n    return late.make()\n")
    before = sys.path[:]
    succeeded(capsys, f"{path}:make")
    assert sys.path == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.py", "parts.py"]
    del sys.modules["parts"]


def test_unknown_operators_are_named_and_counted(write: Write, capsys: Output) -> None:
    path = write(
        MODEL.replace(
            "self.fc(image)", "torch.special.bessel_j0(torch.special.bessel_j0(self.fc(image))).sum()"
        )
    )
    out, err = succeeded(capsys, f"{path}:make", "--summary")
    assert err == (
        "soapstone: note: operator aten.special_bessel_j0.default (2 times) is not known to Soapstone: it"
        " will run whole, on one device\n"
    )
    assert ", 1 note\n" in out


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("make = 3", "'make' of mine.py is an int, not a function that returns a model"),
        ("def maker(): pass", "mine.py has no function 'make'; did you mean 'maker'?"),
        ("def other(): pass", "mine.py has no function 'make'; it defines other"),
        ("", "mine.py has no function 'make'; it defines no function"),
        ("def make(:", "mine.py cannot be loaded: invalid syntax at mine.py:1"),
        ("1 / 0", "mine.py cannot be loaded: ZeroDivisionError at mine.py:1 (1 / 0): division by zero"),
        ("import nowhere", "mine.py cannot be loaded: ModuleNotFoundError at mine.py:1 (import nowhere): No"),
        ("raise SystemExit(3)", "mine.py cannot be loaded: it ends the program at mine.py:1"),
        (
            "def make(): raise ValueError('no data\\nat all')",
            "make failed: ValueError at mine.py:1 (def make",
        ),
        ("def make(): exit()", "make failed: it ends the program at mine.py:1"),
        (
            "def make(size): pass",
            "make needs an argument 'size', which it is not given: let it have a default",
        ),
        ("def make(batch): pass", "make needs to know the batch: say --batch N, or give it a default"),
        (
            "def make(): pass",
            "must return (module, example_inputs) or (module, example_inputs, loss), not noth",
        ),
        ("def make(): return 1, 2, 3, 4", "loss), not a tuple of 4"),
        ("def make(): return 1, 2", "make must return an nn.Module first, not an int"),
        ("def make(): return Net(), None", "a tensor, or a tuple or dict of tensors, not nothing (None)"),
        ("def make(): return Net(), ()", "a tensor, or a tuple or dict of tensors, not a tuple of 0"),
        ("def make(): return Net(), (X, 3)", "make: example input 1 is not a tensor but an int"),
        ("def make(): return Net(), ([X],)", "make: example input 0 is not a tensor but a list of 1"),
        ("def make(): return Net(), {'x': 3}", "make: example input 'x' is not a tensor but an int"),
        ("def make(): return Net(), {1: X}", "make: the names of example inputs are strings, not 1"),
        (
            "def make(): return Net(), X, 'mes'",
            "there is no loss 'mes': choose one of cross_entropy, nll, mse",
        ),
        ("def make(): return Net(), X, X", "or a function of (output, target), not a tensor of shape [8, 6]"),
        ("def make(): return Net(), X, nn.MSELoss", "of (output, target), not the class MSELoss"),
        ("def make(): return Net(), (X, X), 'mse'", "needs a target of shape [8, 4], not [8, 6]"),
        (
            "def make(): return Net(), X.T, 'mse'",
            "cannot be traced on its example inputs: RuntimeError at mine.py:",
        ),
        ("def make(): return Net(), X.T", "cannot be traced on its example inputs: RuntimeError at mine.py:"),
        ("def make(): return Net(), {'y': X}", "unexpected keyword argument 'y'"),
        ("def make(): return Net(), (X, X)", "takes 2 positional arguments but 3 were given"),
        ("def make(): return Net().to('meta'), X", "parameters on meta and example inputs on cpu: put both"),
        ("def make(): return Net().cuda(), X", "make failed: "),
        ("def make(): return Sums(), X, 'mse'", "a tensor of shape [], which looks like a loss already"),
        (
            "def make(): return torch.jit.script(Net()), X",
            "returns a TorchScript module: return the nn.Module",
        ),
        ("def make(): return nn.LazyLinear(4), X", "has the lazy parameter 'weight', whose shape nobody"),
        ("def make(): return nn.Embedding(9, 4, max_norm=1.0), X.long()", "its parameter 'weight' in its"),
        ("def make(): return Words(), X", "the model returns a str: a model returns its loss, or tensors in"),
        (
            "make = dict",
            "must return (module, example_inputs) or (module, example_inputs, loss), not a dict of",
        ),
        ("def make(batch=0): return Net()", "(module, example_inputs, loss), not a Net"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_refused_files(
    code: str, sentence: str, write: Write, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prelude = """
        X = torch.zeros(8, 6)

        class Sums(Net):
            def forward(self, x):
                return self.fc(x).sum()

        class Words(Net):
            def forward(self, x):
                return "words"
        """
    write(f"{code}\n{MODEL.replace('make', 'example')}\n{dedent(prelude)}" if code else "")
    monkeypatch.chdir(tmp_path)
    if "cuda" in code and _has_cuda():
        pytest.skip("there is a CUDA device")
    assert sentence in refused(capsys, "mine.py:make")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_two_losses_are_to_be_summed(write: Write, capsys: Output) -> None:
    path = write(MODEL.replace("self.fc(image)\n", "self.fc(image).mean(), image.mean()\n"))
    assert main(["graph", f"{path}:make"]) == 0
    assert "the model returns 2 numbers and not one loss" in capsys.readouterr().err


def test_refused_paths(write: Write, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(MODEL)
    write(MODEL, "mine.txt")
    monkeypatch.chdir(tmp_path)
    for model, sentence in {
        "./mine.txt:make": "mine.txt is not a Python file: a model is named as path/to/file.py:function",
        "mine.txt:make": "there is no built-in model 'mine.txt'",
        "mine.txt": "'mine.txt' is not a model: write a zoo name",
        "./:make": "there is no file .",
        "mine.py:": "mine.py is a file: name a function in it; it defines make",
        "mine.py:Make": "mine.py has no function 'Make'; did you mean 'make'?",
    }.items():
        assert sentence in refused(capsys, model)
    assert "takes no argument 'batch': give it one, or leave out --batch" in refused(
        capsys, "mine.py:make", "--batch", "4"
    )
    assert len(load("mine.py:make", batch=8, insist=False).inputs[0]) == 8  # as `train` asks for a plan's
    assert "lenet:tiny is the small variant and takes no number" in refused(capsys, "lenet:tiny=3")
    assert "--tiny is for models of the zoo" in refused(capsys, "mine.py:make", "--tiny")
    assert "there is no loss 'mes'" in refused(capsys, "mine.py:make", "--loss", "mes")


def test_a_model_that_fails_is_shown_where(write: Write, capsys: Output) -> None:
    path = write(MODEL.replace("return self.fc(image)", "return self.fc(image[image[:, 0] > 0])"))
    assert refused(capsys, f"{path}:make").startswith("model 'mine' makes a tensor whose shape depends on")
    path = write(MODEL.replace("return self.fc(image)", "if image.sum() > 0: return image"))
    assert "tensor at mine.py:11 (if image.sum() > 0: return image), which" in refused(capsys, f"{path}:make")


# -- as a process ------------------------------------------------------------------------------------


def test_the_installed_command(write: Write) -> None:
    """Once for each outcome, with what torch itself prints."""
    script = Path(sys.executable).parent / "soapstone"
    good = write(MODEL.replace("return self.fc(image)", "return torch.erf(self.fc(image)).sum()"))
    bad = write(
        MODEL.replace("return self.fc(image)", "return image if image.sum() > 0 else -image"), "bad.py"
    )
    run = subprocess.run(
        [script, "graph", f"{good}:make", "--json"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert from_document(json.loads(run.stdout)).loss is not None
    run = subprocess.run(
        [script, "graph", f"{bad}:make"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert "at bad.py:11 (return image if image.sum() > 0 else -image)" in run.stderr


def test_help_shows_examples(capsys: Output) -> None:
    out, _ = succeeded(capsys, "--help")
    assert "Examples:" in out
    assert "soapstone graph train.py:make_model" in out
    for loss in ("cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce_with_logits"):
        assert loss in out
