"""The command line that does a run again. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gockpt.results import Run, Trial


def again(run: Run, strategies: Sequence[str], trials: Sequence[Trial] = ()) -> str:
    """What to type, as far as the run tells; empty for a kind that is not known.

    Args:
        strategies: those of its rows.
        trials: of a crash test.
    """
    workload = run.config.get("workload")
    job: Mapping[str, Any] = workload if isinstance(workload, Mapping) else {}
    chosen = ",".join(dict.fromkeys(one for one in strategies if one and one != "none"))
    if run.kind == "bench":
        options = {
            "--model": job.get("model"),
            "--device": run.device,
            "--strategies": chosen,
            "--steps": job.get("steps"),
            "--interval": job.get("interval"),
            "--tokens": job.get("tokens_per_step"),
            "--windows": job.get("windows"),
            "--precision": job.get("precision"),
            "--seed": job.get("seed"),
        }
        return _line(["gockpt", "bench"], options)
    if run.kind != "crash-test":
        return ""
    if "command" in job:
        results = job.get("results") or []
        words = [word for one in results for word in ("--result", str(one))]
        options = {"--command": job["command"], "--seed": run.config.get("seed")}
        return _line(["gockpt", "crash-test", *words], options)
    options = {
        "--scenario": ",".join(dict.fromkeys(one.scenario for one in trials)),
        "--strategies": chosen,
        "--trials": len(trials) or None,
        "--model": job.get("model"),
        "--device": run.device,
        "--tokens": job.get("tokens_per_step"),
        "--seed": run.config.get("seed"),
        "--sabotage": run.config.get("sabotage"),
    }
    return _line(["gockpt", "crash-test"], options)


def _line(words: list[str], options: Mapping[str, Any]) -> str:
    given = [str(word) for name, value in options.items() if value is not None and value != ""
             for word in (name, value)]  # fmt: skip
    return shlex.join([*words, *given])
