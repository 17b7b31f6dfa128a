"""The entry point: finds the command, runs it, and turns every error into one line and an exit code.

A command module is imported when its command runs, so that `moonclipfs --help` stays quick.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

import click
from click.shell_completion import shell_complete

from moonclipfs import __version__
from moonclipfs.cli.output import COMPLETE_VARIABLE, PROGRAM, printable
from moonclipfs.errors import MoonclipError

TRACEBACK_VARIABLE = "MOONCLIPFS_TRACEBACK"
EXIT_BUG = 70
EXIT_SIGNAL = 128
"""Plus the number of the signal, as shells report it."""

COMMANDS = {
    "init": "Make an empty store.",
    "add": "Publish files or directories as a snapshot.",
    "ls": "List snapshots, or the files of one.",
    "log": "Show the versions of snapshots and where they come from.",
    "show": "Show files and tensors, and how each is stored.",
    "diff": "Compare two snapshots, files or directories, tensor by tensor.",
    "du": "Show logical, exclusive and shared bytes.",
    "stats": "Show what was saved, and why.",
    "export": "Write plain files back.",
    "watch": "Store each finished checkpoint of a plain directory.",
    "restore": "Bind an old version again.",
    "clone": "Give a snapshot a second name, which changes apart.",
    "wait": "Tell each new snapshot as it comes.",
    "forget": "Drop snapshots for good, and free their space.",
    "pin": "Keep versions whatever the rules say.",
    "thin": "Drop the optimizer's state from older snapshots.",
    "optimize": "Make the newest snapshots quick to read.",
    "gc": "Free the space of what nothing refers to.",
    "import-moonclip": "Import the snapshots of a moonclip store.",
    "verify": "Check every stored byte (also: check).",
    "mount": "Mount a store as a file system.",
    "umount": "Unmount a store.",
    "status": "Tell what a mount has stored, and what not yet.",
    "seal": "Make a directory of a mount a snapshot.",
    "flush": "Wait until all that was written is stored.",
    "overlay": "Try changes over a snapshot, and keep them or not.",
    "run": "Mount a store for one command.",
    "doctor": "Check this machine and a store, and say what to do.",
    "completion": "Print the code that completes commands in a shell.",
}
ALIASES = {"check": "verify"}


class Commands(click.Group):
    """The commands of `COMMANDS`, each in the module of its name, where it is called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None for an unknown name."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"moonclipfs.cli.{name.replace('-', '_')}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"moonclipfs.cli.{name}.command is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Keep ML checkpoints once, changed tensors as small lossless deltas, in a file system like any other.

    \b
    Examples:
      moonclipfs init /data/store
      moonclipfs add /data/store out/checkpoint-500 --as run1/checkpoint-500
      moonclipfs ls /data/store
      moonclipfs mount /data/store /mnt/checkpoints

    \b
    What a command works on is named by
      STORE                  the directory of a store
      STORE:NAME[@VERSION]   a snapshot, or a version of it; /PATH may follow
      PATH                   a path inside a mounted store
      NAME[@VERSION]         when $MOONCLIPFS_STORE names the store
    A path that exists wins over a NAME; :NAME always means the store of $MOONCLIPFS_STORE.

    \b
    Exit codes: 0 done, 1 a difference or problem was found, 2 wrong usage, 3 not found, 4 exists,
    5 corrupt, 6 disk full, 7 permission denied, 8 busy, 9 not a known store format, 10 no FUSE here,
    11 the store's directory failed, 12 over a limit, 13 lease lost, 14 mount failed or could not
    store all, 15 a rank did not bring its part, 70 a bug.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are those of the process when None."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    logging.lastResort = stderr_log()
    return guarded(lambda: run(list(sys.argv[1:] if arguments is None else arguments)))


class LogLine(logging.Formatter):
    """A line of the log in the form of an error, with no word that could move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        """`moonclipfs: what the line says`."""
        return f"{PROGRAM}: {printable(record.getMessage())}"


def stderr_log() -> logging.StreamHandler[TextIO]:
    """Warnings of the rooms below for a person; a mount that logs elsewhere has its own handlers."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(LogLine())
    return handler


def run(arguments: list[str]) -> int:
    """Parse and run; output is flushed here, so that a closed pipe is noticed where it is handled.

    The arguments are the `obj` of the context, since provenance keeps the command line.
    """
    try:
        with cli.make_context(PROGRAM, list(arguments), obj=arguments) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def guarded(action: Callable[[], int]) -> int:
    """Return the exit code of `action`, or that of its error after one line on stderr."""
    try:
        return action()
    except click.ClickException as error:
        return complain(click_message(error), error.exit_code)
    except MoonclipError as error:
        return complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_SIGNAL + signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output has gone: what is still buffered goes nowhere, and nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + signal.SIGPIPE
    except OSError as error:
        from moonclipfs.store.backend import from_os_error  # here, since help must not wait for all that this imports

        return complain(os_message(error), from_os_error(error, "").exit_code)
    except MemoryError:
        return complain("out of memory", 1)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return complain(f"bug: {what} (see where with {TRACEBACK_VARIABLE}=1, and please report it)", EXIT_BUG)


def click_message(error: click.ClickException) -> str:
    """What click found wrong with the arguments, and where their help is."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else PROGRAM
    return f"{error.format_message().rstrip('.')} (see `{path} --help`)"


def os_message(error: OSError) -> str:
    """An error of the operating system that no room turned into one of the project's kinds."""
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return where + (error.strerror or str(error))


def complain(message: str, code: int) -> int:
    """Print `message` as a line on stderr (after the traceback when asked for) and return `code`."""
    try:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        # Lists inside a message are indented lines; any other line break comes from a name, and is escaped.
        lines = [printable(line) for line in message.strip().split("\n  ")]
        print(f"{PROGRAM}: " + "\n  ".join(lines), file=sys.stderr, flush=True)
    except OSError:
        return code  # stderr is closed or full: the exit code still tells
    return code
