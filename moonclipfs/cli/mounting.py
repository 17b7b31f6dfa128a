"""The options that `mount` and `run` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from moonclipfs import limits
from moonclipfs.cli.values import duration, duration_or_off, size, size_text, time_text
from moonclipfs.errors import UsageError
from moonclipfs.fuse.prepare import MountOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--read-only", is_flag=True, help="Only snapshots, and nothing can be written."),
    click.option("--layer", metavar="NAME", help="Layer that takes what is written (default: the host's name)."),
    click.option("--staging", metavar="DIR", type=click.Path(), help="Where files wait to be encoded; a fast disk."),
    click.option(
        "--staging-limit",
        metavar="SIZE",
        type=size,
        help=f"Writers wait when so much is staged (default {size_text(limits.STAGING_BYTES)}).",
    ),
    click.option(
        "--seal-after",
        metavar="TIME|off",
        type=duration_or_off,
        default=time_text(limits.SEAL_AFTER_SECONDS),
        help=f"Seal what is complete and was quiet for this long (default {limits.SEAL_AFTER_SECONDS:.0f}).",
    ),
    click.option(
        "--keep-versions",
        metavar="N",
        type=click.IntRange(min=1),
        help=f"Versions kept of those that the mount seals by itself (default {limits.KEEP_VERSIONS}).",
    ),
    click.option(
        "--keep-deleted",
        metavar="TIME",
        type=duration,
        help="Keep what was removed in @versions for this long, while the disk has room "
        f"(default {time_text(limits.KEEP_DELETED_SECONDS)}).",
    ),
    click.option("--allow-other", is_flag=True, help="Let other users in; the store must be private."),
    click.option("--show-virtual", is_flag=True, help="List @latest and @versions at the root, too."),
    click.option(
        "--cache",
        "cache_mib",
        metavar="MIB",
        type=click.IntRange(min=1),
        help=f"Decoded bytes kept in memory (default {limits.BLOCK_CACHE_BYTES // limits.MIB}).",
    ),
    click.option("--log", metavar="FILE", type=click.Path(dir_okay=False), help="File for the log of the mount."),
)


def with_mount_options(function: _Function) -> _Function:
    """Give a command the options that `mount_options` takes."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def mount_options(
    *,
    read_only: bool,
    layer: str | None,
    staging: str | None,
    staging_limit: int | None,
    seal_after: float | None,
    keep_versions: int | None,
    keep_deleted: float | None,
    allow_other: bool,
    show_virtual: bool,
    cache_mib: int | None,
    log: str | None,
    foreground: bool = False,
    dry_run: bool = False,
) -> MountOptions:
    """What the options say. Raises UsageError for options that exclude each other."""
    writing = {
        "layer": layer,
        "staging": None if staging is None else str(Path(staging).absolute()),
        "staging_limit": staging_limit,
        "keep_versions": keep_versions,
        "keep_deleted": keep_deleted,
    }
    given = {name: value for name, value in writing.items() if value is not None}
    if read_only and given:
        raise UsageError(f"--read-only and --{next(iter(given)).replace('_', '-')} exclude each other")
    kept = ["read_only"] * read_only + [name for name in ("layer", "keep_versions", "keep_deleted") if name in given]
    if dry_run and kept:
        raise UsageError(f"--dry-run and --{kept[0].replace('_', '-')} exclude each other")
    return MountOptions(
        foreground=foreground,
        dry_run=dry_run,
        log=None if log is None else str(Path(log).absolute()),
        allow_other=allow_other,
        show_virtual=show_virtual,
        cache_bytes=cache_mib * limits.MIB if cache_mib else limits.BLOCK_CACHE_BYTES,
        read_only=read_only,
        seal_after=seal_after,
        **given,  # type: ignore[arg-type]
    )
