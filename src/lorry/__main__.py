"""`python -m lorry` is `lorry`."""

from lorry.cli import main

main()
