"""`moonclipfs diff`: compare two snapshots, files or directories, tensor by tensor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from moonclipfs.cli.output import emit_json, printable, table
from moonclipfs.cli.progress import count_bar
from moonclipfs.cli.target import complete_target, default_store, opened, same_path
from moonclipfs.errors import UsageError
from moonclipfs.fuse.inside import inside_mount
from moonclipfs.layers.layerside import LayerFiles
from moonclipfs.overlayplaces import InMount, InStore, for_overlay
from moonclipfs.store.compare import Change, DiffReport, FileDiff, diff, tensor_json
from moonclipfs.store.sides import Side, mounted_recipes, path_side, store_side
from moonclipfs.store.store import Store
from moonclipfs.store.target import OVERLAYS, Target, is_unsealed, locate, parse_target, stored_at


@click.command("diff")
@click.argument("left", shell_complete=complete_target)
@click.argument("right", shell_complete=complete_target)
@click.option("--expect-unchanged", multiple=True, metavar="GLOB", help="Fail only if a tensor of this name differs.")
@click.option("--all", "show_all", is_flag=True, help="List unchanged tensors and files, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(left: str, right: str, expect_unchanged: tuple[str, ...], show_all: bool, as_json: bool) -> int:
    """Compare LEFT with RIGHT: snapshots, overlays, paths inside them, or plain files and directories, in any formats.

    What was written in a mount and is not sealed is read like plain files, but for files that an overlay has of its
    base. Tensors are matched by name. Those that both sides keep as the same objects are known to be equal and not
    read.

    Exit code 0 when nothing differs, else 1; with --expect-unchanged, 1 only when a tensor that it matches differs.

    \b
    Examples:
      moonclipfs diff /data/store:run1/checkpoint-500 /data/store:run1/checkpoint-600
      moonclipfs diff /data/store:base finetuned.pt --expect-unchanged 'backbone.*'
      moonclipfs diff model.safetensors model.pt
      moonclipfs diff /mnt/ckpt/@overlays/arm1 /data/store:@overlays/arm2

    \b
    JSON: different, violations, and
      tensors: name, change (unchanged changed added removed dtype shape),
               left and right {path, dtype, shape} or null, note,
               values {elements, changed, share, max_abs, mean_abs, norm, not_finite} or null
      files:   path, change; for what is not in tensors
    What is unchanged is listed with --all only.
    """
    with ExitStack() as stack:
        stores: list[Store] = []
        sides = [_side(text, stack, stores) for text in (left, right)]
        with count_bar("comparing", "tensors") as progress:
            report = diff(*sides, expect_unchanged=expect_unchanged, progress=progress)
    if as_json:
        emit_json(_json(report, show_all))
    else:
        _print(report, show_all)
    return int(bool(report.violations) if expect_unchanged else report.different)


def _side(text: str, stack: ExitStack, stores: list[Store]) -> Side:
    if os.path.lexists(text) and not text.startswith(":") and (is_unsealed(text) or stored_at(text) is None):
        inside = inside_mount(text)
        if inside is None or inside.overlay is None:
            return path_side(Path(text))
        return path_side(Path(text), mounted_recipes(_opened(Path(inside.mount.store), stack, stores)))
    target = parse_target(text, default_store())
    if target.spec.startswith(OVERLAYS + "/"):
        return _overlay_side(target, stack, stores)
    store = _opened(target.store, stack, stores)
    place = locate(store.names(), target.spec)
    if place.version is None:
        raise UsageError(f"{text} is no snapshot: name one (`moonclipfs ls` lists them)")
    return store_side(store, place.version, place.path)


def _overlay_side(target: Target, stack: ExitStack, stores: list[Store]) -> Side:
    """What STORE:@overlays/NAME[/PATH] means: in the mount that has it, else opened here."""
    name, _, path = target.spec.removeprefix(OVERLAYS + "/").partition("/")
    place = InStore(target.store)
    stack.callback(place.close)
    where = for_overlay(place, name)
    if isinstance(where, InMount):
        return _side(os.path.join(where.path(name), path), stack, stores)
    layer = place.overlays.get(name).layer
    files = stack.enter_context(LayerFiles(layer))
    inode = layer.resolve(os.fsencode(path))
    if inode.is_directory:
        return Side(dict(files.below(inode)))
    last = os.fsencode(os.path.basename(path))
    return Side({last: files.side(inode, last)}, single=True)


def _opened(path: Path, stack: ExitStack, stores: list[Store]) -> Store:
    """The store at a path, opened once."""
    store = next((store for store in stores if same_path(store.path, path)), None)
    if store is None:
        store = stack.enter_context(opened(path))
        stores.append(store)
    return store


def _print(report: DiffReport, show_all: bool) -> None:
    told = [found for found in report.tensors if show_all or found.change is not Change.UNCHANGED]
    table(tensor_row(tensor_json(found)) for found in told)
    for file in report.files:
        if show_all or _worth_telling(file):
            click.echo(f"{file.change}  file {printable(file.path)}")
    counts = Counter(str(found.change) for found in report.tensors)
    click.echo(f"{len(report.tensors)} tensors: " + (", ".join(f"{n} {what}" for what, n in counts.items()) or "none"))
    for name in report.violations:
        click.echo(f"expected unchanged: {printable(name)}")


def _worth_telling(file: FileDiff) -> bool:
    """A file of tensors on one side only is told by its tensors."""
    return file.change is Change.CHANGED or (file.change is not Change.UNCHANGED and not file.has_tensors)


def tensor_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of a table for a tensor as `compare.tensor_json` tells it."""
    sides = [_words(place["dtype"], place["shape"]) for place in (found["left"], found["right"]) if place is not None]
    kind = " -> ".join(dict.fromkeys(sides))
    values = found["values"]
    if values is None or not values["changed"]:
        return found["change"], printable(found["name"]), kind, printable(found["note"])
    text = f"{100 * values['share']:.3g}% of elements"
    if values["norm"] is not None:
        text += f", max {values['max_abs']:.3g}, mean {values['mean_abs']:.3g}, norm {values['norm']:.3g}"
    if values["not_finite"]:
        text += f", {values['not_finite']} not finite"
    return found["change"], printable(found["name"]), kind, text


def _words(dtype: str, shape: Sequence[int]) -> str:
    return f"{printable(dtype)} {'x'.join(map(str, shape)) or 'scalar'}"


def _json(report: DiffReport, show_all: bool) -> dict[str, object]:
    tensors = [found for found in report.tensors if show_all or found.change is not Change.UNCHANGED]
    files = [file for file in report.files if show_all or _worth_telling(file)]
    return {
        "different": report.different,
        "violations": list(report.violations),
        "tensors": [tensor_json(found) for found in tensors],
        "files": [{"path": os.fsdecode(file.path), "change": str(file.change)} for file in files],
    }
