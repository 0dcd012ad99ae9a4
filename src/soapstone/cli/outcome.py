"""How a command ends: an exit code, and at most one sentence on standard error.

| code | meaning |
|---|---|
| 0 | done |
| 1 | nobody reads the output any more (a closed pipe) |
| 2 | what the user handed in was wrong; the sentence says what, where, and what to do |
| 130 | stopped with Ctrl-C |

Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer, get_ident
from typing import TYPE_CHECKING

import typer

from soapstone.errors import SoapstoneError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INSTALLED_APART = {"torch": "PyTorch", "transformers": "Hugging Face's transformers"}
"""What plans can be simulated, explained and shown without."""

CLOSED_PIPE = 1
BAD_INPUT = 2
INTERRUPTED = 130

AGAIN_S = 0.02
"""[choice] After which an interrupt that was lost is made anew."""


def exit_code(command: Callable[[], object]) -> int:
    """Run a typer command in non-standalone mode and return the exit code of its outcome."""
    try:
        with _interrupts_are_not_lost():
            result = command()
            sys.stdout.flush()
    except SoapstoneError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(_usage(error))
    except ModuleNotFoundError as error:
        if error.name not in INSTALLED_APART:
            raise
        return _refuse(
            f"this needs {INSTALLED_APART[error.name]}, which is not installed: pip install {error.name}"
        )
    except BrokenPipeError:
        _silence_stdout()
        return CLOSED_PIPE
    except OSError as error:
        if error.filename is None:
            raise
        return _refuse(f"{os.fsdecode(error.filename)}: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


@contextmanager
def _interrupts_are_not_lost() -> Iterator[None]:
    """Python drops what is raised while an object is done away with, Ctrl-C too, and PyTorch does away with
    many of them while it looks at a model. Such an interrupt is made again, a moment later."""
    usual, thread = sys.unraisablehook, get_ident()

    def hook(lost: UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = Timer(AGAIN_S, signal.pthread_kill, (thread, signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _refuse(sentence: str) -> int:
    if sentence:
        print(f"soapstone: {sentence}", file=sys.stderr)
    return BAD_INPUT


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the arguments, and where to read about them; empty if help was shown instead."""
    message = error.format_message()
    # Only typer's private UsageError declares the context, so it is asked for by name.
    context: typer.Context | None = getattr(error, "ctx", None)
    if not message or context is None:
        return message
    sentence = message if message.endswith((".", "?")) else f"{message}."
    return f"{sentence} Try '{context.command_path} --help'."


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's own flush at exit stays quiet too."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
