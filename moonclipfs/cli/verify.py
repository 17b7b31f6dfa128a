"""`moonclipfs verify`: check every stored byte."""

from __future__ import annotations

from dataclasses import asdict

import click

from moonclipfs.cli.output import emit_json, human, printable
from moonclipfs.cli.progress import byte_bar
from moonclipfs.cli.target import complete_target, opened, whole_store
from moonclipfs.errors import CorruptError
from moonclipfs.store.check import verify
from moonclipfs.store.problems import Problem, ProblemKind, VerifyReport

_AFFECTED_SHOWN = 20


@click.command("verify")
@click.argument("store", required=False, shell_complete=complete_target)
@click.option("--quick", is_flag=True, help="Presence and sizes only: no object is decoded.")
@click.option("--contents", is_flag=True, help="Also look for truncated files, stale shard indexes, missing ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(store: str | None, quick: bool, contents: bool, as_json: bool) -> int:
    """Check a store: every log record, every directory, every object decoded and hashed; name the files affected.

    Exit code 0 when all is well; 5 when stored bytes are damaged or missing; 1 when only --contents found something, or
    only the index, a cache, was wrong and was made anew.

    \b
    Examples:
      moonclipfs verify /data/store
      moonclipfs verify --quick --contents /data/store

    \b
    JSON: ok, quick, versions, packs, objects, object_bytes, base, base_objects,
          problems: a list of {kind (log pack object missing chain tree index contents),
                               where, message, affected: [NAME@N/PATH], repaired}
    """
    with opened(whole_store(store)) as opened_store, byte_bar("verifying") as progress:
        report = verify(opened_store, quick=quick, contents=contents, progress=progress)
    if as_json:
        emit_json({"ok": report.ok, **asdict(report)})
    else:
        _print(report)
    return exit_code(report)


def exit_code(report: VerifyReport) -> int:
    """The exit code for what was found: that of damage only when some is left."""
    damaged = any(problem.kind is not ProblemKind.CONTENTS and not problem.repaired for problem in report.problems)
    return CorruptError.exit_code if damaged else int(not report.ok)


def _print(report: VerifyReport) -> None:
    for problem in report.problems:
        _print_problem(problem)
    looked = "looked at" if report.quick else "decoded and hashed"
    found = f"{len(report.problems)} problems" if report.problems else "no problem"
    objects = f"{report.objects} objects" + ("" if report.quick else f" of {human(report.object_bytes)}")
    click.echo(f"{report.versions} versions, {report.packs} packs; {objects} {looked}: {found}")
    if report.base:
        base = printable(report.base)
        click.echo(
            f"{report.base_objects} more objects are in the base store {base}, and were only looked for: "
            f"`moonclipfs verify {base}` decodes them"
        )


def _print_problem(problem: Problem) -> None:
    repaired = " (repaired)" if problem.repaired else ""
    click.echo(f"{problem.kind}: {printable(problem.where)}: {printable(problem.message)}{repaired}")
    for place in problem.affected[:_AFFECTED_SHOWN]:
        click.echo(f"    {printable(place)}")
    if len(problem.affected) > _AFFECTED_SHOWN:
        click.echo(f"    and {len(problem.affected) - _AFFECTED_SHOWN} more")
