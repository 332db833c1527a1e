"""``python -m gockpt``: the same as the ``gockpt`` command."""

from gockpt.cli.main import run

if __name__ == "__main__":
    run()
