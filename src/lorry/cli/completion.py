"""`lorry completion SHELL`: what makes a shell complete commands, options and adapters' names."""

from enum import StrEnum
from typing import Annotated

import typer

SCRIPTS = {
    "bash": """\
_lorry_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
                   _LORRY_COMPLETE=complete_bash lorry ) )
    return 0
}
complete -o default -F _lorry_completion lorry
""",
    "zsh": """\
#compdef lorry
_lorry_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _LORRY_COMPLETE=complete_zsh lorry)
}
compdef _lorry_completion lorry
""",
    "fish": """\
complete --command lorry --no-files --arguments "(env _LORRY_COMPLETE=complete_fish \
_TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS=(commandline -cp) lorry)" \
--condition "env _LORRY_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=is-args \
_TYPER_COMPLETE_ARGS=(commandline -cp) lorry"
""",
}


class Shell(StrEnum):
    """Those that there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Without a server")(completion)


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Write the script that makes a shell complete lorry's commands, options and adapters' names.

    bash: put eval "$(lorry completion bash)" into ~/.bashrc. zsh: the same with zsh into ~/.zshrc,
    behind compinit. fish: lorry completion fish > ~/.config/fish/completions/lorry.fish.
    """
    typer.echo(SCRIPTS[shell.value], nl=False)
