"""Write docs/errors.md anew: `python -m lorry.error_catalogue`, in the project's folder."""

from pathlib import Path

from lorry.error_catalogue.page import errors_page

Path("docs/errors.md").write_text(errors_page())
