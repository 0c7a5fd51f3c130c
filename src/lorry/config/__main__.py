"""Write docs/settings.md anew: `python -m lorry.config`, in the project's folder."""

from pathlib import Path

from lorry.config.page import settings_page

Path("docs/settings.md").write_text(settings_page())
