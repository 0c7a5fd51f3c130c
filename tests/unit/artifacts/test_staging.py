"""What broken downloads leave on the disk."""

import os
from pathlib import Path

from lorry.artifacts.remote.site import Listing, RemoteFile
from lorry.artifacts.remote.staging import KEPT_S, ONCE, Staging

LISTING = Listing("hf://org/x@abc", (RemoteFile("adapter_config.json", 3, "tag"),), fixed=True)


def test_a_start_removes_the_downloads_that_nobody_can_go_on_from(tmp_path: Path) -> None:
    root = tmp_path / "downloads"
    for name in (f"{ONCE}killed", "old", "young"):
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_bytes(b"{}")
    os.utime(root / "old", (0, 0))
    living = Staging(root, 1000).open(LISTING, 3)
    Staging(root, 1000).remove_abandoned()
    assert {path.name for path in root.iterdir()} == {"young", living.path.name}
    living.close(keep=False)


def test_a_start_leaves_no_empty_folder_of_downloads(tmp_path: Path) -> None:
    root = tmp_path / "downloads"
    (root / f"{ONCE}killed").mkdir(parents=True)
    Staging(root, 1000).remove_abandoned()
    assert not root.exists()
    Staging(root, 1000).remove_abandoned()
    assert KEPT_S > 0
