"""`moonclipfs status`: what a mount has stored, and what it has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from moonclipfs.api import status
from moonclipfs.cli.output import emit_json, human, printable, table

_LISTED = 20
"""Lines of one kind that are printed; all of them are in the JSON."""


@click.command("status")
@click.argument("directory", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(directory: str, as_json: bool) -> int:
    """Tell what the mount of DIRECTORY has staged, is encoding, has stored and can reclaim, and what is the matter.

    Exit code 1 when something could not be stored, else 0.

    \b
    Examples:
      moonclipfs status /mnt/ckpt
      moonclipfs status --json /mnt/ckpt | jq .staged_bytes

    \b
    JSON: store, mountpoint, read_only; of a mount that writes also: layer, staged_files,
          staged_bytes, encoding_files, failed_files (path to message), encoder, captures (sealed,
          not published yet), missing (path to what keeps it from being sealed), conflicts,
          reclaimable, troubles, dry_run, overlays (as `overlay status --json`)
    """
    about = status(directory)
    if as_json:
        emit_json(about)
    else:
        _print(about)
    return int(any(about.get(key) for key in ("failed_files", "troubles")))


def _print(about: Mapping[str, Any]) -> None:
    layer = "read-only" if about["read_only"] else f"layer {about['layer']}"
    if about.get("dry_run"):
        layer = "a dry run: nothing that is written is kept"
    click.echo(printable(f"{about['mountpoint']}: {about['store']}, {layer}"))
    if about["read_only"]:
        return
    encoder = about.get("encoder", {})
    table(
        [
            ("staged", human(about["staged_bytes"]), _staged(about)),
            ("stored", human(encoder.get("encoded_bytes", 0)), "since it was mounted"),
            ("reclaimable", human(about["reclaimable"]), ""),
        ],
        right=(1,),
    )
    if about["captures"]:
        click.echo(f"sealed and not published yet: {about['captures']}")
    _list("overlays that are open:", (_overlay(one) for one in about.get("overlays", ())))
    _list("not complete:", (f"{path}: {', '.join(what)}" for path, what in sorted(about["missing"].items())))
    _list("published by others, while this mount has its own files there:", iter(about["conflicts"]))
    _list("could not be stored:", (f"{path}: {why}" for path, why in sorted(about["failed_files"].items())))
    _list("trouble:", iter(about["troubles"]))


def _overlay(about: Mapping[str, Any]) -> str:
    on = f" on {about['base']}" if about["base"] else ""
    return f"{about['name']}{on}: {human(about['staged_bytes'])} staged"


def _list(title: str, lines: Iterator[str]) -> None:
    listed = list(lines)
    if listed:
        click.echo(title)
    for line in listed[:_LISTED]:
        click.echo(f"  {printable(line)}")
    if len(listed) > _LISTED:
        click.echo(f"  and {len(listed) - _LISTED} more")


def _staged(about: Mapping[str, Any]) -> str:
    waiting, encoding, failed = about["staged_files"], about["encoding_files"], len(about["failed_files"])
    parts = [(waiting, "to be encoded"), (encoding, "being encoded"), (failed, "failed")]
    counts = ", ".join(f"{count} {what}" for count, what in parts if count)
    return _files(waiting + encoding + failed) + (f": {counts}" if counts else "")


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"
