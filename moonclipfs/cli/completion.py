"""`moonclipfs completion`: the code that completes commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from moonclipfs.cli.output import COMPLETE_VARIABLE, PROGRAM
from moonclipfs.errors import UsageError


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the code that makes SHELL complete commands, options, and names of snapshots.

    Names are completed after STORE: and, with $MOONCLIPFS_STORE, alone; bash, which splits words at a colon, completes
    the latter only.

    \b
    Examples:
      eval "$(moonclipfs completion bash)"                                  in ~/.bashrc
      eval "$(moonclipfs completion zsh)"                                   in ~/.zshrc
      moonclipfs completion fish > ~/.config/fish/completions/moonclipfs.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"no completion for {shell}")
    root = click.get_current_context().find_root()
    click.echo(kind(root.command, {}, PROGRAM, COMPLETE_VARIABLE).source())
