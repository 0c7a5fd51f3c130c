"""docs/settings.md, made from the list of settings so that it cannot be out of date."""

from lorry.config.fields import SettingSpec, specs


def settings_page() -> str:
    """docs/settings.md, made from the fields."""
    lines = [
        "# Settings",
        "",
        "<!-- Made from src/lorry/config/fields.py by `python -m lorry.config`; do not edit. -->",
        "",
        "Each setting has one name: a flag of `lorry serve`, a variable, and a key of the TOML",
        "file given with `--config` (or `LORRY_CONFIG`), where `_` and `-` are the same. A flag",
        "wins over a variable, a variable over the file. Sizes are written like `8GiB` or `500MB`,",
        "times in seconds. A variable with several values separates them by commas or is a JSON",
        "list. A second flag in a row is SGLang's name of the first. vLLM's and SGLang's",
        "`--enable-lora` is taken, and changes nothing: adapters can always be loaded.",
    ]
    for panel in dict.fromkeys(spec.panel for spec in specs()):
        lines += [
            "",
            f"## {panel}",
            "",
            "| flag | variable | value | default | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(spec) for spec in specs() if spec.panel == panel]
    return "\n".join(lines) + "\n"


def _row(spec: SettingSpec) -> str:
    several = ", repeatable" if spec.repeatable else ""
    cells = (
        ", ".join(f"`{flag}`" for flag in (spec.flag, *spec.aliases)),
        f"`{spec.variable}`",
        spec.metavar.replace("|", "\\|") + several,
        spec.default_text,
        spec.help,
    )
    return "| " + " | ".join(cells) + " |"
