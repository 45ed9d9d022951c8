"""The command line: run one command with kvxfer's exit statuses, and find it by name for `kvxfer NAME …`.

No command is imported before it is asked for, so that `kvxfer --help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from kvxfer import __version__
from kvxfer.errors import ExitStatus, KvxferError, UsageError, is_short_of_memory
from kvxfer.wording import did_you_mean, plain, quoted

COMMANDS = {
    "bench": ("kvxfer.bench", "measure moving a model's KV cache between two processes or hosts"),
    "serve": ("kvxfer.serve", "wait on another host for a bench to measure against"),
    "model": ("kvxfer.model_command", "show what a model's KV cache weighs, layer by layer"),
    "plan": ("kvxfer.plan", "set transfer against prefill, from assumptions or a measured result"),
    "keys": ("kvxfer.keys", "make the keys that bench and serve know each other by"),
    "doctor": ("kvxfer.doctor", "say what this machine has, what is missing, and how to get it"),
}
"""Name, and the module whose main(argv) runs it, with one line of help."""

DEBUG = "--debug"
"""Taken out of any command's arguments: a failure shows its traceback."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """`kvxfer`: run the command named first. Returns the exit status."""
    words, debug = _take_debug(argv)
    return guarded(lambda: _dispatch(words, debug), "kvxfer", debug)


def run(command: Callable[..., int | None], argv: Sequence[str] | None, prog: str) -> int:
    """Run a function with typer annotations on the arguments (sys.argv's when None). Returns the exit status.

    The function returns None or an exit status; every error becomes one or two lines on stderr. A parameter annotated
    with typer.Context has in its `obj` the whole command line as a list of words.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's; unused here, and each costs time and address space
    words, debug = _take_debug(argv)
    return guarded(lambda: _run_typer(command, words, prog), prog, debug)


def guarded(action: Callable[[], int | None], prog: str, debug: bool) -> int:
    """Run the action and turn what it raises into a line on stderr and an exit status; debug adds the traceback."""
    try:
        _open_standard_streams()
        status = action()
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
        return int(status or ExitStatus.DONE)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            _ignore_interruptions()
        if debug:
            complain(traceback.format_exc())
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, *DISK_FULL):
            _silence_stdout()
        status, lines = _explain(error, prog)
        complain(*lines)
        return status


def complain(*lines: str) -> None:
    """Say it on standard error. That nobody reads it any more, or that its disk is full, changes no exit status."""
    with contextlib.suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def end_in_order() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that is closed, do what Ctrl-C does. What nohup ignores stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _ignore_interruptions() -> None:
    """All that still come: while the interpreter ends, one would kill it and take the place of the exit status."""
    with contextlib.suppress(ValueError):  # only the main thread may, and only it is interrupted
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.default_int_handler, _interrupt):
                signal.signal(number, signal.SIG_IGN)


def _run_typer(command: Callable[..., int | None], words: list[str], prog: str) -> int | None:
    import typer  # here: `kvxfer --help` needs none of it

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    epilog = f"{DEBUG} shows the traceback of a failure."
    app.command(epilog=epilog, context_settings={"help_option_names": ["--help", "-h"]})(command)
    try:
        status: int | None = typer.main.get_command(app).main(
            words, prog_name=prog, standalone_mode=False, obj=[*prog.split(), *words]
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as error:  # typer's answer to a closed pipe
        return error.code if isinstance(error.code, int) else ExitStatus.UNEXPECTED
    if status == ExitStatus.INTERRUPTED:  # what some versions of typer make of Ctrl-C, others raise Abort
        raise KeyboardInterrupt
    return status


def _dispatch(words: list[str], debug: bool) -> int:
    if not words:
        complain(_help())
        return ExitStatus.USAGE
    name, *rest = words
    if name in ("--help", "-h", "help"):
        print(_help())
        return ExitStatus.DONE
    if name == "--version":
        print(f"kvxfer {__version__}")
        return ExitStatus.DONE
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(f"no {what} {quoted(name)}{did_you_mean(name, COMMANDS)}; commands are {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[name][0])
    status: int = module.main([*([DEBUG] if debug else []), *rest])
    return status


def _take_debug(argv: Sequence[str] | None) -> tuple[list[str], bool]:
    words = list(sys.argv[1:] if argv is None else argv)
    return [word for word in words if word != DEBUG], DEBUG in words


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: kvxfer COMMAND [OPTIONS]",
            "",
            "Measure what moving an LLM's KV cache from prefill to decode costs, and set it against prefill.",
            "",
            "Commands:",
            *lines,
            "",
            "kvxfer COMMAND --help lists a command's options. kvxfer --version tells the version.",
        ]
    )


def _explain(error: BaseException, prog: str) -> tuple[int, list[str]]:
    """Exit status and the lines that tell the user what, why and what to do."""
    start = f"{prog}: error:"
    if isinstance(error, KvxferError):
        return error.status, [f"{start} {plain(str(error))}"]
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED, [f"{prog}: interrupted"]
    if isinstance(error, BrokenPipeError):  # whoever read our output wants no more of it
        return ExitStatus.UNEXPECTED, []
    if is_short_of_memory(error):
        return ExitStatus.UNAVAILABLE, [f"{start} not enough memory; ask for fewer tokens or a smaller model"]
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return ExitStatus.UNAVAILABLE, [f"{start} cannot write: {error.strerror}; free some space"]
    code = getattr(error, "errno", None)  # the system has them, and ZeroMQ
    if code in (errno.EMFILE, errno.ENFILE):
        return ExitStatus.UNAVAILABLE, [f"{start} too many open files; raise the limit (ulimit -n)"]
    if code == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return ExitStatus.UNAVAILABLE, [
            f"{start} no more processes or threads, or no memory for them; raise the limit (ulimit -u, ulimit -v)"
        ]
    if hasattr(error, "format_message"):  # typer's errors about options; their base class differs between its versions
        return ExitStatus.USAGE, [f"{start} {plain(error.format_message())}", f"{prog} --help lists the options"]
    what = plain(f"{type(error).__name__}: {error}")
    return ExitStatus.UNEXPECTED, [f"{prog}: unexpected failure: {what} (run again with {DEBUG} for the traceback)"]


def _open_standard_streams() -> None:
    """Let those that our starter closed lead nowhere; the next files opened would take their numbers otherwise."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _silence_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere; the interpreter would fail on it again when it exits."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
