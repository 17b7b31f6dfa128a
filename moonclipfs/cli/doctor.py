"""`moonclipfs doctor`: check this machine and a store, and say what to do."""

from __future__ import annotations

import click

from moonclipfs import __version__
from moonclipfs.cli.output import emit_json, printable
from moonclipfs.cli.target import complete_target, default_store, whole_store
from moonclipfs.codec.checks import kernel
from moonclipfs.fuse.machine import check_machine
from moonclipfs.layers.unfinished import check_layers
from moonclipfs.store.health import Finding, State, check_store

_MARKS = {State.OK: "ok", State.NOTE: "note", State.PROBLEM: "PROBLEM"}


@click.command("doctor")
@click.argument("store", required=False, shell_complete=complete_target)
@click.option("--json", "as_json", is_flag=True, help="Print a list of {where, what, state, text, advice}.")
def command(store: str | None, as_json: bool) -> int:
    """Check what a mount needs of this machine and, when STORE is given, the store's health; say what to do.

    Exit code 1 when something does not work, else 0. For every byte of a store, see `moonclipfs verify`.

    \b
    Examples:
      moonclipfs doctor
      moonclipfs doctor /data/store
      moonclipfs doctor --json | jq '.[] | select(.state == "problem")'
    """
    found = [("machine", finding) for finding in [_version(), *check_machine()]]
    if store or default_store():
        root = whole_store(store)
        found += [("store", finding) for finding in (*check_store(root), *check_layers(root))]
    if as_json:
        emit_json([{"where": where, **_json(finding)} for where, finding in found])
    else:
        for _, finding in found:
            _print(finding)
    return int(any(finding.state is State.PROBLEM for _, finding in found))


def _version() -> Finding:
    return Finding("moonclipfs", State.OK, f"{__version__}, codec kernels: {kernel()}")


def _json(finding: Finding) -> dict[str, str]:
    return {"what": finding.what, "state": str(finding.state), "text": finding.text, "advice": finding.advice}


def _print(finding: Finding) -> None:
    click.echo(f"{_MARKS[finding.state]:<7}  {finding.what}: {printable(finding.text)}")
    if finding.advice:
        click.echo(f"         -> {printable(finding.advice)}")
