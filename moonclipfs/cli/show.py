"""`moonclipfs show`: files and tensors, and how each is stored."""

from __future__ import annotations

import os

import click

from moonclipfs.cli.output import emit_json, human, printable, ratio, table
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.errors import UsageError
from moonclipfs.store.describe import FileReport, Storage, TensorReport, describe
from moonclipfs.store.target import locate


@click.command("show")
@click.argument("target", required=False, shell_complete=complete_target)
@click.option("--files", "files_only", is_flag=True, help="Show files only, no tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of files; keys below.")
def command(target: str | None, files_only: bool, as_json: bool) -> None:
    """Show the files and tensors of a snapshot, or of a path inside one, and how each is stored.

    A tensor is stored in full, as a delta against an earlier one, or shared: its bytes are those of something stored
    before. A file that is not understood is stored byte for byte all the same; the reason is shown.

    \b
    Examples:
      moonclipfs show /data/store:run1/checkpoint-500
      moonclipfs show /data/store:run1/checkpoint-500@2/model.safetensors
      moonclipfs show --json /mnt/checkpoints/run1/checkpoint-500 | jq '.[].tensors[].name'

    \b
    JSON of a file:   path, size, format, reason, tensors, and as a tensor: stored .. sharers
    JSON of a tensor: name, dtype, shape, size; stored (encoded bytes), new (those of them
                      that nothing before uses), raw {full, delta, shared, literal, hole: bytes},
                      depth, bases, sharers
    """
    wanted = one_target(target)
    with opened(wanted) as store:
        place = locate(store.names(), wanted.spec)
        if place.version is None:
            raise UsageError("name one snapshot: STORE:NAME (`moonclipfs ls` lists them)")
        reports = describe(store, place.version, place.path)
        if as_json:
            emit_json([_file_json(report, files_only) for report in reports])
            return
        for report in reports:
            _print(report, files_only)


def _print(report: FileReport, files_only: bool) -> None:
    sizes = f"{human(report.size)}, stored {human(report.storage.stored)} ({ratio(report.size, report.storage.stored)})"
    reason = f" ({printable(report.reason)})" if report.reason else ""
    click.echo(f"{printable(report.path)}  {report.format}{reason}  {sizes}{_how(report.storage)}")
    if not files_only:
        table((_row(tensor) for tensor in report.tensors), right=(3, 4))


def _row(report: TensorReport) -> tuple[str, ...]:
    tensor = report.tensor
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    word = tensor.dtype_name or tensor.dtype.name
    sizes = human(tensor.length), human(report.storage.stored)
    return ("    " + printable(tensor.name), printable(word), shape, *sizes, _how(report.storage).strip())


def _how(storage: Storage) -> str:
    """`  60% delta against A, 40% shared with B`."""
    total = sum(storage.raw.values())
    parts = []
    for how, length in sorted(storage.raw.items(), key=lambda item: -item[1]):
        words = str(how) if length == total else f"{_percent(length, total)} {how}"
        if how == "delta":
            words += f" against {_some(storage.bases)}"
        elif how == "shared":
            words += f" with {_some(storage.sharers)}"
        parts.append(words)
    return "  " + ", ".join(parts) if parts else ""


def _percent(part: int, total: int) -> str:
    share = 100 * part / total
    return "<1%" if share < 1 else ">99%" if share > 99 else f"{share:.0f}%"


def _some(names: list[str]) -> str:
    shown = printable(names[0]) if names else "?"
    return f"{shown} and {len(names) - 1} more" if len(names) > 1 else shown


def _storage_json(storage: Storage) -> dict[str, object]:
    return {
        "stored": round(storage.stored),
        "new": round(storage.new),
        "raw": {str(how): length for how, length in storage.raw.items()},
        "depth": storage.depth,
        "bases": storage.bases,
        "sharers": storage.sharers,
    }


def _file_json(report: FileReport, files_only: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "path": os.fsdecode(report.path),
        "size": report.size,
        "format": report.format,
        "reason": report.reason,
        **_storage_json(report.storage),
    }
    if not files_only:
        found["tensors"] = [_tensor_json(tensor) for tensor in report.tensors]
    return found


def _tensor_json(report: TensorReport) -> dict[str, object]:
    tensor = report.tensor
    return {
        "name": tensor.name,
        "dtype": tensor.dtype_name or tensor.dtype.name,
        "shape": list(tensor.shape),
        "size": tensor.length,
        **_storage_json(report.storage),
    }
