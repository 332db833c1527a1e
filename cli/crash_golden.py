"""Golden runs: computed once for each configuration, and kept in the user's cache.

Runs in the parent. What always holds: the key of a kept run covers all that its bits depend on:
the job, the machine, the versions, and the source of the workloads.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import msgspec
import platformdirs
import torch

import gockpt
from gockpt import workloads
from gockpt.cli.crash_job import Event, Golden, Job
from gockpt.cli.crash_leftovers import Mark
from gockpt.cli.crash_process import Life
from gockpt.cli.crash_setup import INTERVAL, KEEP, STEPS, Setup
from gockpt.errors import GockptError

TIMEOUT = 1800.0


def golden_run(setup: Setup, seed: int, event: Event | None, scratch: Path) -> Path:
    """The file of a golden run, made if it is not there.

    Raises:
        GockptError: it failed.
    """
    cache = Path(platformdirs.user_cache_dir("gockpt")) / "crash-test"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{_key(setup, seed, event)}.json"
    if not _readable(path):
        _compute(setup, seed, event, path, scratch)
    return path


def _compute(setup: Setup, seed: int, event: Event | None, path: Path, scratch: Path) -> None:
    mark = Mark()
    job = Job(
        **{
            **msgspec.structs.asdict(setup.task),
            "seed": seed,
            "strategy": None,
            "steps": STEPS,
            "interval": INTERVAL,
            "keep": KEEP,
            "windows": None,
            "directory": str(scratch),
            "golden": str(path),
            "environment": mark.environ(),
            "log": str(scratch / "golden.log"),
            "event": event,
        }
    )
    life = Life(job, mark)
    try:
        while not life.over:
            life.poll(0.2)
            if life.silent() > TIMEOUT:
                raise GockptError(f"the golden run took more than {TIMEOUT:.0f} s")
    finally:
        life.close()
    if life.ended is None:
        reason = life.broke.reason if life.broke else "it died"
        raise GockptError(f"the golden run failed: {reason}")


def _readable(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes(), type=Golden)
    except (OSError, msgspec.MsgspecError):
        return False
    return True


def _key(setup: Setup, seed: int, event: Event | None) -> str:
    digest = hashlib.sha256()
    facts = [setup.task, seed, event, STEPS, gockpt.__version__, str(torch.__version__)]
    digest.update(msgspec.json.encode([*facts, platform.python_version(), list(platform.uname())]))
    source = Path(workloads.__file__).parent
    for file in [*sorted(source.glob("*.py")), Path(__file__).with_name("crash_lesson.py")]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
