"""`moonclipfs run`: a mount for one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from moonclipfs.cli.mounting import mount_options, with_mount_options
from moonclipfs.cli.output import PROGRAM, printable
from moonclipfs.cli.rundry import DryRunOf, DryRunOptions
from moonclipfs.cli.target import complete_target, whole_store
from moonclipfs.cli.values import size
from moonclipfs.errors import MountError, UsageError
from moonclipfs.fuse.attached import SIGNALS, AttachedMount
from moonclipfs.fuse.namespace import Isolation, adopt_orphans
from moonclipfs.overlayplaces import base_spec
from moonclipfs.store.alternates import temporary_private_store

_COMMAND = f"{__name__}.command"
_SI_KERNEL = 0x80
"""`si_code` of a signal that a terminal sends: its whole foreground group gets it, the command too."""
_STEP_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
"""What a command leaves running may end by itself for so long, and then after SIGTERM for the next."""
_END_SECONDS = 5.0


class _CommandLine(click.Command):
    """A command whose last arguments, after `--`, are a command line that is left as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, after = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[_COMMAND] = after
        try:
            return super().parse_args(ctx, before)
        except click.UsageError as error:
            if "--" in args:
                raise
            message = f"{error.format_message().rstrip('.')}; the command to run goes after `--`"
            raise click.UsageError(message, ctx) from error


@click.command("run", cls=_CommandLine)
@click.argument("store", metavar="[STORE] -- COMMAND...", required=False, shell_complete=complete_target)
@click.option("--at", metavar="DIR", type=click.Path(), help="Where to mount (default: a new temporary directory).")
@click.option("--dry-run", is_flag=True, help="Everything can be written, and nothing of it is kept.")
@click.option("--base", metavar="BASE", help="In a dry run, what the directory shows: NAME[@VERSION] or an overlay.")
@click.option("--quota", metavar="SIZE", type=size, help="In a dry run, at most so much may be changed.")
@click.option("--commit", is_flag=True, help="Commit the dry run when the command succeeds.")
@click.option("--as", "as_name", metavar="SNAPSHOT", help="Name of what --commit makes (default: one is made up).")
@click.option("--report", metavar="FILE", type=click.Path(), help="Write what a dry run changed as JSON to a file.")
@with_mount_options
@click.pass_context
def command(
    context: click.Context,
    /,
    store: str | None,
    at: str | None,
    dry_run: bool,
    base: str | None,
    quota: int | None,
    commit: bool,
    as_name: str | None,
    report: str | None,
    **chosen: Any,
) -> int:
    """Mount STORE (or $MOONCLIPFS_STORE) for COMMAND alone, and unmount when it has ended.

    The mount is in a mount namespace of its own where that is allowed: no other process sees it. The command finds
    it at DIR, and in $MOONCLIPFS_MOUNT. Signals that are sent to this process go to the command. When it has ended,
    what it left running is ended, what it wrote is stored and sealed, and its exit code is returned (128 and the
    number of the signal that killed it). When something could not be stored, a line says so, the exit code is never
    0, and the next mount of the same layer stores it.

    With --dry-run nothing in the store is changed. The command works in a directory that shows --base, or without that
    the whole store: {dir} in its words stands for it, and $MOONCLIPFS_DRY_RUN. When it has ended, what it changed is
    told on stderr, and on a terminal it can be kept by giving it a name; else it is gone. With --commit it is kept when
    the command succeeds, and the command may seal and save there.

    \b
    Examples:
      moonclipfs run /data/store -- sh -c 'python train.py --output_dir "$MOONCLIPFS_MOUNT/run1"'
      moonclipfs run /data/store --at /mnt/ckpt -- torchrun train.py --output_dir /mnt/ckpt/run1
      moonclipfs run --read-only /data/store --at /mnt/ckpt -- python evaluate.py /mnt/ckpt/run1
      moonclipfs run --dry-run /data/store --base run1/checkpoint-500 -- python edit.py {dir}
      moonclipfs run --dry-run /data/store --base model --commit --as folded -- python fold.py {dir}

    \b
    JSON of --report: as of `moonclipfs overlay diff --json`
    """
    words: list[str] = context.meta[_COMMAND]
    if not words:
        raise UsageError("run takes a command, after `--`: moonclipfs run STORE -- COMMAND...")
    options = mount_options(dry_run=dry_run, **chosen)
    path = os.path.abspath(whole_store(store))
    dry = None
    if dry_run:
        spec = base_spec(base, Path(path)) or None
        told = None if report is None else os.path.abspath(report)
        dry = DryRunOptions(spec, quota, commit, as_name, told, os.path.isdir(path) and not os.access(path, os.W_OK))
        dry.check()
    elif base or quota or commit or as_name or report:
        raise UsageError("--base, --quota, --commit, --as and --report are for a --dry-run")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS | {signal.SIGCHLD})
    try:
        with ExitStack() as stack:
            made = at is None or not os.path.lexists(at)
            place = stack.enter_context(_directory(at))
            if dry is not None and dry.read_only:
                path = os.fspath(stack.enter_context(temporary_private_store(path, purpose="dry run")))
            try:
                mount = AttachedMount(path, place, options, cancelled=_told_to_end, temporary=made)
            except InterruptedError:
                return 128 + signal.sigwait(SIGNALS)
            return _run(mount, words, before, dry)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(mount: AttachedMount, words: list[str], mask: Collection[int], dry: DryRunOptions | None) -> int:
    """Run the command in a mount, and end the mount; return the exit code of both."""
    environment, run_dry = mount.environment, None
    if dry is not None:
        try:
            run_dry = DryRunOf(mount, dry)
        except BaseException:
            mount.finish()
            raise
        words, environment = run_dry.words(words), run_dry.environment
    if mount.isolation is Isolation.NONE:
        _say(f"no namespaces here: the mount at {mount.place} is seen by other processes of this user, too")
    adopt_orphans(True)
    try:
        child = subprocess.Popen(mount.command_line(words, mask), env=environment)
        ended = _Watch([child, mount.server])
        ended.wait(child, forward=True)
        _end_leftovers(ended, mount.server)
        died_early = mount.server.poll() is not None
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if run_dry is not None and not died_early:
            code = run_dry.finish(code, mask, _say)
        mount.stop()
        if not ended.wait(mount.server, forward=False):
            if dry is None:
                _say("interrupted: what is not stored yet is kept, and stored by the next mount of the same layer")
            mount.server.kill()
        problem = mount.finish()
    finally:
        adopt_orphans(False)
    if died_early:
        _say(f"the mount ended before the command did: {problem or 'it was unmounted'}")
    elif problem:
        _say(problem if dry is not None else f"{problem}; the next mount of this layer goes on with it")
    return code or (MountError.exit_code if died_early or problem else 0)


class _Watch:
    """Waits for processes while signals come, and clears orphans away."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = {process.pid: process for process in processes}

    def wait(self, process: subprocess.Popen[bytes], *, forward: bool) -> bool:
        """Return True at the end of a process; signals go to it with `forward`, else SIGINT returns False."""
        while process.poll() is None:
            found = signal.sigtimedwait(SIGNALS | {signal.SIGCHLD}, _STEP_SECONDS)
            self.reap()
            if found is None or found.si_signo == signal.SIGCHLD:
                continue
            if forward and found.si_code != _SI_KERNEL:
                process.send_signal(found.si_signo)
            elif not forward and found.si_signo == signal.SIGINT:
                return process.poll() is not None
        return True

    def reap(self) -> None:
        """Clear away every child that has ended."""
        with suppress(ChildProcessError):  # there is none
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if (known := self._processes.get(found.si_pid)) is not None:
                    known.poll()
                else:
                    os.waitpid(found.si_pid, 0)


def _end_leftovers(watch: _Watch, server: subprocess.Popen[bytes]) -> None:
    """End what the command left running: it would keep the mount busy, and has nobody to tell."""

    def left() -> list[int]:
        watch.reap()
        return _descendants(os.getpid(), server.pid)

    if _all_gone(left, _LEAVE_SECONDS):
        return
    pids = left()
    names = ", ".join(sorted({_name(pid) for pid in pids}))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if _all_gone(left, _END_SECONDS):
            break
    _say(f"ended {len(pids)} process{'' if len(pids) == 1 else 'es'} that the command left running: {names}")


def _all_gone(left: Callable[[], list[int]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while left():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _descendants(pid: int, without: int) -> list[int]:
    """The processes below one, but not `without` and those below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [pid]
    while todo:
        below = [child for child in children.get(todo.pop(), []) if child != without]
        found += below
        todo += below
    return found


def _name(pid: int) -> str:
    try:
        return printable(Path("/proc", str(pid), "comm").read_text(errors="replace").strip())
    except OSError:
        return str(pid)


@contextmanager
def _directory(at: str | None) -> Iterator[str]:
    """The directory to mount on; one that is made here is removed behind."""
    if at is not None and os.path.lexists(at):
        yield at
        return
    made = tempfile.mkdtemp(prefix="moonclipfs-") if at is None else at
    if at is not None:
        os.mkdir(at)
    try:
        yield made
    finally:
        try:
            os.rmdir(made)
        except OSError as error:
            _say(f"{made} stays: {error.strerror}")


def _told_to_end() -> bool:
    return bool(signal.sigpending() & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def _say(text: str) -> None:
    print(f"{PROGRAM}: {printable(text)}", file=sys.stderr, flush=True)
