"""`moonclipfs log`: the versions of snapshots and where they come from."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping

import click

from moonclipfs.cli.output import emit_json, human, number, printable, version_json, when
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.errors import NotFoundError
from moonclipfs.store.log import Names, parse_spec
from moonclipfs.types import Version


@click.command("log")
@click.argument("target", required=False, shell_complete=complete_target)
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Show at most this many, the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print a list; keys below.")
def command(target: str | None, limit: int | None, as_json: bool) -> None:
    """Show the kept versions of TARGET (a store, a prefix, a NAME or a pattern), newest first, removed ones too.

    \b
    Examples:
      moonclipfs log /data/store
      moonclipfs log -n 3 /data/store:run1
      moonclipfs log --json /data/store:run1/checkpoint-500

    \b
    JSON: name, version, files, bytes, time_ns, current, removed, provenance
          {command, cwd, host, user, python, version, git: {commit, dirty}, job: {variable: value}}
    """
    wanted = one_target(target)
    with opened(wanted) as store:
        names = store.names()
        found = matching(names, wanted.spec)
        shown = found[:limit]
        if as_json:
            emit_json([_json(version, names) for version in shown])
            return
        for version in shown:
            _print(version, names)


def matching(names: Names, spec: str) -> list[Version]:
    """All kept versions whose name is `spec`, lies below it, or matches it as a pattern; newest first.

    Raises NotFoundError when there are none, except in an empty store.
    """
    path, wanted = parse_spec(spec) if spec else ("", None)
    below = path + "/" if path else ""
    found = [
        version
        for version in names.all_versions()
        if (version.path == path or version.path.startswith(below) or fnmatch.fnmatchcase(version.path, path))
        and wanted in (None, version.number)
    ]
    if spec and not found:
        raise NotFoundError(f"no kept version of {spec}")
    return sorted(found, key=lambda version: version.sequence, reverse=True)


def _json(version: Version, names: Names) -> dict[str, object]:
    return {
        **version_json(version), "current": _is_current(version, names), "removed": bool(version.removed),
        "provenance": _provenance(version),
    }  # fmt: skip


def _is_current(version: Version, names: Names) -> bool:
    bound = names.bound().get(version.path)
    return bound is not None and bound.number == version.number


def _provenance(version: Version) -> Mapping[str, object]:
    found = version.metadata.get("provenance")
    return found if isinstance(found, Mapping) else {}


def _print(version: Version, names: Names) -> None:
    state = "" if _is_current(version, names) else "  (removed)" if version.removed else "  (replaced)"
    files = number(version, "files")
    size = f"{files} file{'' if files == 1 else 's'}, {human(number(version, 'bytes'))}"
    click.echo(f"{printable(version.path)}@{version.number}  {when(version.time_ns)}  {size}{state}")
    for title, text in _details(_provenance(version)):
        click.echo(f"    {title:<8} {printable(text)}")


def _details(provenance: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if "command" in provenance:
        yield "command", str(provenance["command"])
    if "cwd" in provenance:
        yield "in", str(provenance["cwd"])
    git = provenance.get("git")
    if isinstance(git, Mapping):
        yield "git", f"{git.get('commit')}{' (dirty)' if git.get('dirty') else ''}"
    job = provenance.get("job")
    if isinstance(job, Mapping):
        yield "job", " ".join(f"{name}={value}" for name, value in job.items())
    if "user" in provenance or "host" in provenance:
        yield "by", f"{provenance.get('user', '?')}@{provenance.get('host', '?')}"
