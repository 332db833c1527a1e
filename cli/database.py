"""Where results are kept unless the user names another place."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from gockpt.errors import ConfigError


def database_path(given: str | None) -> Path:
    """The results database: ``--db``, or the one in the user's data directory.

    Raises:
        ConfigError: the path is a directory.
    """
    path = Path(given) if given else Path(platformdirs.user_data_dir("gockpt")) / "results.db"
    if path.is_dir():
        raise ConfigError(f"--db {path}: that is a directory; name a file")
    return path
