"""Counts to 6 with a checkpoint at each step, in plain Python: what does not need torch is quick.

    python counter.py [in-place] [helper] [clock] [fails] [hangs]

in-place: the checkpoint is overwritten, so that a kill can leave half of it. helper: it starts a
process that leaves its session and outlives it. clock: its result never repeats. fails, hangs: so
it does, in the golden run too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from handshake import DIRECTORY, reached

STATE = DIRECTORY / "state.json"


def save(state: dict[str, int], *, in_place: bool) -> None:
    """Write the checkpoint, in two parts."""
    text = json.dumps(state)
    path = STATE if in_place else STATE.with_suffix(".tmp")
    with path.open("w") as file:
        file.write(text[:5])
        file.flush()
        reached(f"half-{state['step']}")
        file.write(text[5:])
    path.rename(STATE)


def main(ways: set[str]) -> None:
    """Count, from the checkpoint if there is one."""
    if "helper" in ways:
        helper = [sys.executable, "-c", "import time; time.sleep(100)"]
        subprocess.Popen(helper, start_new_session=True)
    state = json.loads(STATE.read_text()) if STATE.exists() else {"step": 0, "sum": 0}
    while state["step"] < 6:
        state = {"step": state["step"] + 1, "sum": state["sum"] + state["step"] ** 2}
        save(state, in_place="in-place" in ways)
        sys.stdout.write(f"step {state['step']}\n")
        sys.stdout.flush()
        reached(str(state["step"]))
    if "hangs" in ways:
        time.sleep(100)
    if "fails" in ways:
        sys.exit("no money left")
    result = {**state, "clock": time.time_ns() if "clock" in ways else 0}
    (DIRECTORY / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(set(sys.argv[1:]))
