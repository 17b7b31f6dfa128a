"""`moonclipfs clone`: a second name for a snapshot, which changes apart from then on."""

from __future__ import annotations

import click

from moonclipfs.cli.inside import new_name, source_name
from moonclipfs.cli.restore import report, writable
from moonclipfs.cli.target import complete_target, opened
from moonclipfs.errors import UsageError
from moonclipfs.fuse.control import ask
from moonclipfs.store.rebind import clone


@click.command("clone")
@click.argument("source", shell_complete=complete_target)
@click.argument("name")
def command(source: str, name: str) -> None:
    """Bind the snapshot SOURCE (or SOURCE@N) under a new NAME too, at once, whatever its size.

    Both share every byte until one of them changes. What was written into SOURCE since its last seal is not in the
    clone: `moonclipfs seal` it first.

    \b
    Examples:
      moonclipfs clone /data/store:run1/checkpoint-500 tune2/start
      moonclipfs clone /mnt/ckpt/run1/checkpoint-500 /mnt/ckpt/tune2/start
      moonclipfs clone /data/store:run1/last.ckpt@3 run1/before-divergence
    """
    found, inside = source_name(source)
    if not found.spec:
        raise UsageError(f"{source} is a whole store: name a snapshot, STORE:NAME")
    new, inside_new = new_name(name, found.store)
    mount = writable(inside, inside_new)
    if mount is None:
        with opened(found, write=True) as store:
            version = clone(store, found.spec, new)
        report(version.path, version.number)
    else:
        answer = ask(mount, "clone", None, source=found.spec, target=new)
        report(answer["path"], answer["number"])
