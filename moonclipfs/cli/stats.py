"""`moonclipfs stats`: what was saved, and why."""

from __future__ import annotations

from dataclasses import asdict

import click

from moonclipfs.cli.output import emit_json, human, ratio, table
from moonclipfs.cli.target import complete_target, opened, whole_store
from moonclipfs.store.usage import Part, StoreStats, stats


@click.command("stats")
@click.argument("store", required=False, shell_complete=complete_target)
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(store: str | None, as_json: bool) -> None:
    """Show what a store holds and by which means space was saved: shared bytes, deltas, full encodings, by dtype.
    What layers alone need, files of no version yet, is left out of the ratio.

    \b
    Examples:
      moonclipfs stats /data/store
      moonclipfs stats --json /data/store | jq .ratio

    \b
    JSON (bytes): versions, files, logical, shared, holes, literals, ratio,
                  full, delta, in_base, trees, only_bases, layers and each of dtypes
                  {objects, raw, stored}, dead, overhead, packs, pack_bytes
    """
    with opened(whole_store(store)) as opened_store:
        found = stats(opened_store)
    if as_json:
        emit_json({**asdict(found), "ratio": found.ratio})
    else:
        _print(found)


def _print(found: StoreStats) -> None:
    click.echo(
        f"{found.files} files of {found.versions} versions: {human(found.logical)} in {found.packs} packs of "
        f"{human(found.pack_bytes)} ({ratio(found.logical, found.version_bytes) if found.logical else '-'})"
    )
    plain = [("shared", found.shared), ("holes", found.holes), ("in recipes", found.literals)]
    rows = [("", *_cells(name, Part(raw=size))) for name, size in plain if size]
    rows += [("", *_cells("deltas", found.delta)), ("", *_cells("in full", found.full))]
    if found.in_base.objects:
        rows += [("", "in the base store", str(found.in_base.objects), human(found.in_base.raw), "-", "-")]
    rows += [("dtype", *_cells(name, part)) for name, part in sorted(found.dtypes.items())]
    rows += [("packs", *_cells("directories and recipes", found.trees))]
    rows += [("packs", *_cells("held only as bases", found.only_bases))]
    if found.layers.objects:
        rows += [("packs", *_cells("for layers alone", found.layers))]
    rows += [
        ("packs", name, "", "", human(size), "") for name, size in (("dead", found.dead), ("overhead", found.overhead))
    ]
    table(rows, ("", "", "OBJECTS", "SIZE", "STORED", "RATIO"), right=(2, 3, 4, 5))


def _cells(name: str, part: Part) -> tuple[str, ...]:
    objects = str(part.objects) if part.objects else ""
    stored = human(part.stored) if part.objects else "-"
    return name, objects, human(part.raw), stored, ratio(part.raw, part.stored)
