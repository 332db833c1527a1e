"""The state of the random number generators that training draws from.

Python's ``random``, numpy's global generator, torch's CPU generator and those of the CUDA devices
that are in use. Taken on the training thread at the target step, without waiting for the device
(CUDA keeps seed and offset on the host); put back last of all, since restoring other objects may
draw numbers.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from gockpt.errors import ExtrasError

_log = logging.getLogger("gockpt")


def capture_rng(device_type: str) -> dict[str, Any]:
    """Take the state of all generators; it shares nothing with them.

    Args:
        device_type: ``"cuda"`` adds every CUDA device, if CUDA has been used in this process.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device_type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def rng_tree(state: dict[str, Any]) -> dict[str, Any]:
    """What :func:`capture_rng` returned as a tree for :func:`gockpt.tagged.encode`."""
    version, words, gauss = state["python"]
    return {**state, "python": (version, np.array(words, dtype=np.uint32), gauss)}


def restore_rng(state: Any) -> None:
    """Put back what :func:`rng_tree` returned.

    Raises:
        ExtrasError: not such a state, or numpy's global generator is of another kind here. Then
            no generator has been changed, except where numpy or torch itself refuses its state.
    """
    try:
        version, words, gauss = state["python"]
        python = (version, tuple(words.tolist()), gauss)
        numpy_state, cpu, cuda = state["numpy"], state["torch"], state.get("cuda", [])
        _check_numpy(numpy_state["bit_generator"])
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        _restore_cuda(cuda)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ExtrasError(
            f"extras['rng']: no state of random number generators ({error}); "
            "restore another checkpoint"
        ) from error


def _check_numpy(saved: str) -> None:
    here = np.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise ExtrasError(
            f"extras['rng'].numpy: saved from {saved}, but numpy's global generator is {here}; "
            f"call numpy.random.set_bit_generator(numpy.random.{saved}()) before restoring"
        )


def _restore_cuda(states: list[torch.Tensor]) -> None:
    if not states:
        return
    count = torch.cuda.device_count()
    if count != len(states):
        _log.warning(
            "the checkpoint has generators of %d CUDA devices, this process %d: "
            "the first %d are restored",
            *(len(states), count, min(count, len(states))),
        )
    for index, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state, index)
