"""`moonclipfs init`: make an empty store."""

from __future__ import annotations

from pathlib import Path

import click

from moonclipfs.cli.output import emit_json, printable
from moonclipfs.cli.target import default_store
from moonclipfs.errors import UsageError
from moonclipfs.store.store import Store


@click.command("init")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--shared", type=click.Choice(["group"]), help="Let the group of the directory in, too.")
@click.option("--json", "as_json", is_flag=True, help="Print {store, id}.")
def command(path: Path | None, shared: str | None, as_json: bool) -> None:
    """Make an empty store in the directory PATH (or $MOONCLIPFS_STORE), which must be new or empty.

    A store is private: whoever can read it can read everything in it.

    \b
    Examples:
      moonclipfs init /data/store
      moonclipfs init --shared=group /project/store
    """
    where = path or default_store()
    if where is None:
        raise UsageError("no path given: where shall the store be?")
    with Store.create(where, shared=shared == "group") as store:
        if as_json:
            emit_json({"store": str(store.path), "id": store.config.store_id})
        else:
            click.echo(f"made a store in {printable(str(store.path))}")
