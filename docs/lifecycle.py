"""Write the made parts of docs/lifecycle.md anew: `python docs/lifecycle.py`."""

from pathlib import Path

from lorry.lifecycle.diagram import refreshed

PAGE = Path(__file__).with_suffix(".md")

PAGE.write_text(refreshed(PAGE.read_text()))
