"""Write the made parts of docs/lifecycle.md anew: `python -m lorry.lifecycle`, in the project's
folder. The one module of this package that touches a file; no other imports it."""

from pathlib import Path

from lorry.lifecycle.diagram import refreshed

PAGE = Path("docs/lifecycle.md")

PAGE.write_text(refreshed(PAGE.read_text()))
