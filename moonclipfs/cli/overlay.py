"""`moonclipfs overlay`: copy-on-write directories over a snapshot, to try something and keep it or not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from moonclipfs.cli.output import emit_json, human, printable, table, when
from moonclipfs.cli.overlaywords import (
    ask_long,
    complete_place,
    one_overlay,
    one_place,
    overlay_row,
    print_commit,
    print_diff,
)
from moonclipfs.cli.target import complete_target, whole_store
from moonclipfs.cli.values import size
from moonclipfs.cli.wait import wait_for_mounts
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.overlayplaces import InMount, InStore, base_spec, for_base
from moonclipfs.store.alternates import make_private_store

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HEADER = ("NAME", "BASE", "CREATED", "")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group("overlay", context_settings=_CONTEXT)
def command() -> None:
    """Work with overlays: writable directories over a snapshot, which cost what is changed in them.

    An overlay is seen at MOUNT/@overlays/NAME, and the base below it is never touched. It is kept until it is
    discarded; `commit` makes a snapshot of it. MOUNT_OR_STORE is a mount, or the directory of a store that need not be
    mounted; without it, $MOONCLIPFS_STORE is meant. Instead of MOUNT_OR_STORE NAME, a path in the overlay may be given.

    \b
    Examples:
      moonclipfs overlay create /mnt/ckpt arm1 --base run1/checkpoint-500
      python train.py --output_dir /mnt/ckpt/@overlays/arm1
      moonclipfs overlay diff /mnt/ckpt/@overlays/arm1
      moonclipfs overlay commit /mnt/ckpt arm1 --as run1/arm1
      moonclipfs overlay discard /mnt/ckpt arm1
    """


def _words(metavar: str, least: int) -> Callable[[_Function], _Function]:
    """The arguments of a command about one overlay."""
    return click.argument("words", metavar=metavar, nargs=-1, required=least > 0, shell_complete=complete_place)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")


@command.command("create")
@_words("[MOUNT_OR_STORE] NAME", 1)
@click.option("--base", metavar="BASE", help="NAME[@VERSION] of a snapshot, an overlay, or a PATH in a mount.")
@click.option("--quota", metavar="SIZE", type=size, help="At most so much may be changed: then EDQUOT.")
@click.option("--ephemeral", is_flag=True, help="Discarded when its mount ends.")
@click.option("--owner", metavar="PID", type=click.IntRange(min=1), help="Discarded when this process ends.")
@click.option("--dry-run", is_flag=True, help="It can be neither committed nor saved to; discarded as --ephemeral.")
@click.option("--state", metavar="DIR", type=click.Path(), help="Keep all that is written in a private store at DIR.")
@_as_json
def create(
    words: tuple[str, ...],
    base: str | None,
    quota: int | None,
    ephemeral: bool,
    owner: int | None,
    dry_run: bool,
    state: str | None,
    as_json: bool,
) -> None:
    """Make an overlay NAME over BASE as that is now, or over nothing; prints where it is seen.

    It takes the same time for any base. A base that is a directory of a mount is captured as of this moment; versions
    that an overlay stands on are kept while it is there.

    With --state, the store is only read, and may lie on a read-only disk: what is written goes into a private store at
    DIR, which is mounted to use the overlay. Nothing then keeps the base from being deleted in its store.

    \b
    Examples:
      moonclipfs overlay create /mnt/ckpt arm1 --base run1/checkpoint-500
      moonclipfs overlay create /mnt/ckpt arm2 --base arm1 --quota 20G
      moonclipfs overlay create /mnt/ckpt trial --base /mnt/ckpt/run1/last --owner $$
      moonclipfs overlay create /data/store arm1 --base base-model --state /scratch/arm1

    \b
    JSON: name, base, created_ns, quota, ephemeral, dry_run, owner, holder, path (or null)
    """
    where, name = (None, words[0]) if len(words) == 1 else (words[0], words[1])
    if len(words) > 2:
        raise UsageError(f"one name is needed, after the mount or store: {' '.join(words[1:])}")
    belongs = {} if owner is None else {"pid": owner}
    with one_place(where) as named:
        place = for_base(named, base) if state is None else named
        if isinstance(place, InStore) and (ephemeral or belongs or dry_run):
            raise UsageError(f"{place.store}: only a mount can discard an overlay when its time is over: name a mount")
        options = {
            "quota": quota,
            "ephemeral": ephemeral or owner is not None or dry_run,
            "dry_run": dry_run,
            "owner": belongs or None,
        }
        spec = base_spec(base, place.store)
        if state is None:
            _tell_created(place, dict(place.ask("overlay_create", name=name, base=spec, **options)), as_json)
            return
        if spec.startswith(("/", "@")):
            raise UsageError(f"with --state, a store is only read: seal or commit {base}, and name the snapshot")
        if options["ephemeral"]:
            raise UsageError("--state keeps an overlay beside its base: it is not discarded by itself")
        with make_private_store(state, place.store, purpose="overlay create") as store, InStore(store) as private:
            _tell_created(private, dict(private.ask("overlay_create", name=name, base=spec, **options)), as_json)


def _tell_created(place: InMount | InStore, answer: dict[str, Any], as_json: bool) -> None:
    path = place.path(answer["name"])
    if as_json:
        emit_json({**answer, "path": path})
    elif path is not None:
        click.echo(printable(path))
    else:
        on = f" on {answer['base']}" if answer["base"] else ""
        click.echo(
            printable(
                f"{answer['name']}{on}: `moonclipfs mount {place.store} DIR` shows it at DIR/@overlays/{answer['name']}"
            )
        )


@command.command("list")
@click.argument("where", metavar="[MOUNT_OR_STORE]", required=False, shell_complete=complete_place)
@_as_json
def list_(where: str | None, as_json: bool) -> None:
    """List the overlays of a mount or store, and who has them open.

    Exit code 5 when the description of one is damaged; the others are listed then, too.

    \b
    Examples:
      moonclipfs overlay list /mnt/ckpt
      moonclipfs overlay list --json /data/store | jq -r '.[].name'

    \b
    JSON: a list of name, base, created_ns, quota, ephemeral, dry_run, owner,
          holder {pid, host, mountpoint} or null, path (or null)
    """
    with one_place(where) as place:
        answer = place.ask("overlay_list")
        found = answer["overlays"]
        if as_json:
            emit_json([{**one, "path": place.path(one["name"])} for one in found])
        elif found:
            table(map(overlay_row, found), _HEADER)
    if answer["damaged"]:
        raise CorruptError("; ".join(answer["damaged"]))


@command.command("status")
@_words("[MOUNT_OR_STORE] NAME", 1)
@_as_json
def status(words: tuple[str, ...], as_json: bool) -> int:
    """Tell what an overlay stands on, and what in it is not stored yet.

    Exit code 1 when something could not be stored, else 0.

    \b
    Examples:
      moonclipfs overlay status /mnt/ckpt arm1
      moonclipfs overlay status --json /mnt/ckpt/@overlays/arm1

    \b
    JSON: as `list`, and staged_files, staged_bytes, encoding_files, failed_files (path to
          message), encoder; used: bytes that count for the quota
    """
    with one_overlay(words) as (place, name, _):
        about = {**place.ask("overlay_status", name=name), "path": place.path(name)}
    if as_json:
        emit_json(about)
    else:
        _print_status(about)
    return int(bool(about["failed_files"]))


def _print_status(about: dict[str, Any]) -> None:
    rows = [("base", printable(about["base"] or "nothing")), ("created", when(about["created_ns"]))]
    if about["path"] is not None:
        rows.append(("path", printable(about["path"])))
    if about["dry_run"] or about["ephemeral"]:
        rows.append(("kind", "dry run: nothing of it is kept" if about["dry_run"] else "ephemeral"))
    used = "" if about.get("used") is None else human(about["used"])
    if about["quota"] is not None:
        rows.append(("quota", f"{used or '?'} of {human(about['quota'])}"))
    elif used:
        rows.append(("changed", used))
    files = about["staged_files"] + about["encoding_files"]
    rows.append(("staged", f"{human(about['staged_bytes'])} in {files} file{'' if files == 1 else 's'}"))
    table(rows)
    for path, why in sorted(about["failed_files"].items()):
        click.echo(f"could not be stored: {printable(path)}: {printable(why)}")


@command.command("diff")
@_words("[MOUNT_OR_STORE] NAME", 1)
@_as_json
def diff(words: tuple[str, ...], as_json: bool) -> int:
    """Tell what an overlay has changed of its base: files, and each tensor of them.

    What the overlay takes from the objects of its base is not read. A renamed file is one that was removed and one
    that was added; its tensors are known to be the same. To compare two overlays, or an overlay with a snapshot, use
    `moonclipfs diff` with their paths in a mount.

    Exit code 0 when nothing was changed, else 1.

    \b
    Examples:
      moonclipfs overlay diff /mnt/ckpt arm1
      moonclipfs overlay diff --json /data/store arm1 | jq '.tensors[].values.norm'

    \b
    JSON: name, base, different, and
      files:   path, type, change (added removed changed attributes), attributes (of mode
               owner xattrs times)
      tensors: name, change (changed added removed dtype shape), left and right
               {path, dtype, shape} or null, note,
               values {elements, changed, share, max_abs, mean_abs, norm, not_finite} or null
    """
    with one_overlay(words) as (place, name, _):
        found = ask_long(place, "overlay_diff", "comparing", name=name)
    if as_json:
        emit_json(found)
    else:
        print_diff(found)
    return int(found["different"])


@command.command("commit")
@_words("[MOUNT_OR_STORE] NAME", 1)
@click.option("--as", "as_name", metavar="SNAPSHOT", help="Name of the snapshot (default: that of the overlay).")
@click.option(
    "--into", metavar="STORE", help="Make it a snapshot of another store: what that lacks is copied.",
    shell_complete=complete_target,
)  # fmt: skip
@_as_json
def commit(words: tuple[str, ...], as_name: str | None, into: str | None, as_json: bool) -> None:
    """Make what an overlay shows now the next version of a snapshot, and print that as SNAPSHOT@N.

    Its tensors are deltas against the base. The overlay goes on as it was. When the newest version is the same already,
    nothing is made.

    \b
    Examples:
      moonclipfs overlay commit /mnt/ckpt arm1
      moonclipfs overlay commit /mnt/ckpt arm1 --as run1/arm1
      moonclipfs overlay commit /scratch/arm1 arm1 --into /data/store

    \b
    JSON: path, number, new (whether it was made just now), files, bytes
    """
    target = None if into is None else os.path.realpath(whole_store(into))
    with one_overlay(words) as (place, name, _):
        answer = ask_long(place, "overlay_commit", "storing", name=name, **{"as": as_name}, into=target)
        wait_for_mounts(answer["path"], answer["number"], place.store if target is None else Path(target))
    if as_json:
        emit_json(answer)
    else:
        print_commit(answer)


@command.command("discard")
@_words("[MOUNT_OR_STORE] NAME", 1)
@click.option("--force", is_flag=True, help="Though files in it are open.")
def discard(words: tuple[str, ...], force: bool) -> None:
    """Throw an overlay away, with all in it that was not committed. Takes no longer for one over a large base.

    \b
    Examples:
      moonclipfs overlay discard /mnt/ckpt arm1
      moonclipfs overlay discard --force /mnt/ckpt/@overlays/arm1
    """
    with one_overlay(words) as (place, name, _):
        place.ask("overlay_discard", name=name, force=force)


@command.command("rename")
@_words("[MOUNT_OR_STORE] NAME NEW", 2)
def rename(words: tuple[str, ...]) -> None:
    """Call an overlay NEW.

    \b
    Examples:
      moonclipfs overlay rename /mnt/ckpt arm1 winner
    """
    with one_overlay(words, 1) as (place, name, rest):
        place.ask("overlay_rename", name=name, new=rest[0])


@command.command("rebase")
@_words("[MOUNT_OR_STORE] NAME", 1)
@click.option("--onto", metavar="BASE", help="As --base of `create` (default: the newest version of the base).")
@_as_json
def rebase(words: tuple[str, ...], onto: str | None, as_json: bool) -> int:
    """Put an overlay onto another version of its base, file by file.

    What the base changed since shows, and what the overlay changed stays. Where both changed one file, that of the
    overlay stays, and a line tells where that of the base is. No file of the overlay may be open for writing.

    Exit code 1 when both have changed something, else 0.

    \b
    Examples:
      moonclipfs overlay rebase /mnt/ckpt arm1
      moonclipfs overlay rebase /mnt/ckpt arm1 --onto run1/checkpoint-600

    \b
    JSON: name, base, conflicts: path, what, base (the path in a mount of what the base has, or "")
    """
    with one_overlay(words) as (place, name, _):
        spec = None if onto is None else base_spec(onto, place.store)
        answer = ask_long(place, "overlay_rebase", "storing", name=name, base=spec)
        mountpoint = place.mount.mountpoint if isinstance(place, InMount) else ""
    if as_json:
        emit_json(answer)
    else:
        click.echo(printable(f"{answer['name']} stands on {answer['base'] or 'nothing'}"))
        for one in answer["conflicts"]:
            where = f"; the base's is {os.path.join(mountpoint, one['base'])}" if one["base"] else ""
            click.echo(printable(f"conflict: {one['path']}: {one['what']}{where}"))
    return int(bool(answer["conflicts"]))
