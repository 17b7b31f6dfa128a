"""Where a snapshot came from: the command, the commit, the job, the host and the user, as kept in its log record.

Environment variables are never stored, except the job numbers of `_JOB_VARIABLES`. In the command line, the value
of an option whose name speaks of a secret, and passwords inside URLs, are replaced by `***`; a secret given as a bare
argument cannot be told from other words and is kept, so `--no-provenance` is there for such commands.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from moonclipfs import limits

_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME")
_SECRET_WORDS = frozenset(
    {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "secret", "token"}
)
_SECRET_PAIRS = frozenset({("access", "key"), ("api", "key"), ("private", "key")})
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_HIDDEN = "***"


def collect(argv: Sequence[str], cwd: Path) -> dict[str, object]:
    """Describe the present process as JSON values; asks git about `cwd` for at most 2 seconds, and never fails.

    Keys: `command`, `cwd`, `host`, `user`, `python`, `version`; `git` (`commit`, `dirty`) inside a work tree with a
    commit; `job` (variable name to value) inside a SLURM job.
    """
    found: dict[str, object] = {
        "command": shlex.join(_without_secrets(argv))[: limits.PROVENANCE_COMMAND_CHARACTERS],
        "cwd": str(cwd),
        "host": socket.gethostname(),
        "user": _user(),
        "python": platform.python_version(),
        "version": _version(),
    }
    if git := _git(cwd):
        found["git"] = git
    if job := {name: os.environ[name] for name in _JOB_VARIABLES if name in os.environ}:
        found["job"] = job
    return found


def of_process(pid: int) -> dict[str, object]:
    """What can be told at once of another process: `command`, `cwd`, `user` and `job`; empty when it is gone.

    `with_surroundings` completes it.
    """
    place = Path("/proc") / str(pid)
    try:
        words = (place / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        cwd = os.readlink(place / "cwd")
        uid = os.stat(place).st_uid
        pairs = [pair.partition(b"=") for pair in (place / "environ").read_bytes().split(b"\0")]
    except OSError:
        return {}
    environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    found: dict[str, object] = {
        "command": shlex.join(_without_secrets(list(map(os.fsdecode, words))))[: limits.PROVENANCE_COMMAND_CHARACTERS],
        "cwd": cwd,
        "user": _name_of(uid),
    }
    if job := {name: environment[name] for name in _JOB_VARIABLES if name in environment}:
        found["job"] = job
    return found


def with_surroundings(found: Mapping[str, object]) -> dict[str, object]:
    """Add what `collect` tells beside that: `host`, `version` and `git` of its directory."""
    told = {**found, "host": socket.gethostname(), "version": _version()}
    if git := _git(Path(str(found.get("cwd", "/")))):
        told["git"] = git
    return told


def _without_secrets(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif equals and _is_secret(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_URL_PASSWORD.sub(rf"\1{_HIDDEN}@", word))
        hide_next = word.startswith("-") and not equals and _is_secret(name)
    return shown


def _is_secret(name: str) -> bool:
    """True when the words of an option's or variable's name speak of a secret: `--hf-token`, `WANDB_API_KEY`."""
    words = re.split(r"[-_.]+", name.lower())
    return not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(pairwise(words))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return str(os.getuid())


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # no such user in this container
        return str(uid)


def _version() -> str:
    try:
        return importlib.metadata.version("moonclipfs")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _git(cwd: Path) -> dict[str, object] | None:
    # A repository's own config may name a program as file system monitor: switched off, since `cwd` may be anyone's.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(cwd), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limits.PROVENANCE_GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    commit = next((line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")), "")
    if result.returncode != 0 or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
