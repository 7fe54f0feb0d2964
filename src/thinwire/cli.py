"""The ``thinwire`` command: the one place that turns errors into one line and an exit code."""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

import thinwire
from thinwire.core.errors import first_line

_USAGE = """usage: thinwire COMMAND [options]

commands:
  train [RECIPE]   train a model with one or more replicas   (thinwire train --help)
  page RUN         build the page of a run folder again      (thinwire page --help)
  plan             predict step times over a given link      (thinwire plan --help)
  plan scale       predict steps of many replicas            (thinwire plan scale --help)
  bench step       measure an optimizer step on this machine (thinwire bench --help)
  lab run          run commands over thin links, real ones   (thinwire lab --help)
  study run        answer questions by training              (thinwire study --help)

options:
  --version        print the version
  --help           print this
"""


def main() -> None:
    """The ``thinwire`` program."""
    _quieten()
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # nobody reads any more; the work is done all the same
            stream.flush()
    logging.shutdown()
    # A gloo process may abort while the interpreter takes its threads down (pytorch issue 190489); all is written by now.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code."""
    arguments = list(arguments)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("thinwire: ended by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        extra = "elastic" if (error.name or "").startswith("torchft") else "train"
        print(f"thinwire: more packages are needed ({error}): pip install -e '.[{extra}]' in a clone", file=sys.stderr)
        return 1
    except Exception as error:  # the one place where every error ends
        return _report(error, "--debug" in arguments)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if command == "--version":
        print(f"thinwire {thinwire.__version__}")
        return 0
    commands = _commands()
    if command not in commands:
        print(f"thinwire: there is no command {command!r}; there are {', '.join(commands)}", file=sys.stderr)
        return 2
    try:
        return commands[command](arguments[1:])
    except SystemExit as error:  # the parser's way to end after --help or a wrong option
        return error.code if isinstance(error.code, int) else 1


def _commands() -> dict[str, Callable[[list[str]], int]]:
    from thinwire.commands import bench, lab, page, plan, study, train

    commands = {"train": train.command, "plan": plan.command, "bench": bench.command, "lab": lab.command}
    return {**commands, "study": study.command, "page": page.command}


def _report(error: Exception, debug: bool) -> int:
    from thinwire.parallel.launch import LAUNCHED, MAY_PASS, InterruptedRunError, ReplicaError, record_error

    if isinstance(error, InterruptedRunError):
        return 128 + error.signal_number
    line = " ".join(first_line(error).split())
    if not isinstance(error, ReplicaError) and "RANK" in os.environ:
        line = line if line.startswith("replica ") else f"replica {os.environ['RANK']}: {line}"
    if debug:
        traceback.print_exception(error)
    if LAUNCHED in os.environ and "TORCHELASTIC_ERROR_FILE" in os.environ:
        record_error(line, os.environ["TORCHELASTIC_ERROR_FILE"])
        if getattr(error, "may_pass", False) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return MAY_PASS
    else:
        print(f"thinwire: {line}", file=sys.stderr)
    return 1


def _quieten() -> None:
    """Libraries' remarks would tear the progress display; errors are told by `_report`."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("RUST_LOG", "error")  # torchft
    # bfloat16 matrix products stop with SIGILL on some CPUs unless oneDNN is kept from their newest instructions.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
