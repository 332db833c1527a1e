"""Many saves: neither memory nor descriptors grow, in the trainer or in the agent."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
from identity_kit import Bag, checkpointer, one_pass

from gockpt.storage.lock import holder

DEADLINE = 200.0
SHAPES = ((512, 512), (77,), ())
IMAGE = 3 * 512 * 512 * 4
SAVES = 100
WARM = 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_saves_cost_no_memory_and_no_descriptors(tmp_path: Path) -> None:
    """Both processes, from the twentieth save on; every save is looked at."""
    training = Bag(shapes=SHAPES)
    seen: dict[str, list[tuple[int, int]]] = {"trainer": [], "agent": []}
    with checkpointer(
        training, tmp_path, every=1, windows=1, keep=2, agent="process", device="cpu"
    ) as ckpt:
        pid = holder(tmp_path / ".gockpt" / "rank-00000.lock")["pid"]
        assert isinstance(pid, int)
        processes = {"trainer": psutil.Process(), "agent": psutil.Process(pid)}
        for step in range(1, WARM + SAVES + 1):
            one_pass(ckpt, training, step)
            ckpt.step()
            ckpt.wait(DEADLINE)
            if step % 10 == 0:
                gc.collect()
            for name, process in processes.items():
                seen[name].append((process.memory_info().rss, process.num_fds()))
        assert ckpt.client is not None
        assert ckpt.client.totals.committed == WARM + SAVES
    for name, figures in seen.items():
        memory, descriptors = np.array(figures[WARM:]).T
        growth = float(np.polyfit(np.arange(SAVES), memory, 1)[0])
        # An allocator breathes; what keeps but a twentieth of every save would be seen.
        assert growth < IMAGE / 20, f"{name}: {growth:.0f} bytes a save"
        # One more is open while a directory is synced or deleted, now and then.
        assert np.median(descriptors[-20:]) <= np.median(descriptors[:20]), f"{name}: {descriptors}"
        assert max(descriptors) <= min(descriptors) + 4, f"{name}: {descriptors}"


TINY = """
    import json, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    import torch, gockpt
    from torch import nn

    class Many(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.list = nn.ParameterList(torch.randn(1 + n % 7) for n in range(COUNT))

    COUNT = 5000
    def make(seed):
        model = Many(seed)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def train(model, optimizer):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    path = sys.argv[1]
    model, optimizer = make(0)
    with gockpt.Checkpointer(model, optimizer, path, every=2, windows=2) as ckpt:
        for _ in range(2):
            train(model, optimizer)
            ckpt.step()
    other, fresh = make(1)
    with gockpt.Checkpointer(other, fresh, path) as ckpt:
        restored = ckpt.restore()
    same = all(map(torch.equal, model.parameters(), other.parameters())) and all(
        torch.equal(optimizer.state[one][key], fresh.state[two][key])
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
        for key in ("step", "exp_avg", "exp_avg_sq")
    )
    found = gockpt.open(path)
    print(json.dumps({
        "step": restored.step, "same": same, "problems": found.verify(),
        "names": len(found.names()), "windows": found.info.windows,
        "one": torch.equal(found.tensor("model.list.4999"), model.list[4999]),
    }))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_tiny_tensors_need_few_descriptors(tmp_path: Path) -> None:
    """Fifteen thousand tensors in a process that may open 256 files."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 256
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TINY), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "step": 2,
        "same": True,
        "problems": [],
        "names": 4 * 5000,
        "windows": 2,
        "one": True,
    }
