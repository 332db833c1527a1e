"""How long a step of a named model would take on the modelled accelerator. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gockpt.devices.profiles import Profile

UPDATE_BYTES_PER_PARAM = 40
"""AdamW on fp32 master weights beside a 16-bit model: the gradient is read (2) and upcast (4), the
update reads weight, m, v, gradient (16) and writes weight, m, v (12), the cast reads and writes
(4 + 2)."""

RESIDENT_BYTES_PER_PARAM = 20
"""16-bit weight and gradient (4), fp32 weight, m, v (12), upcast gradient (4)."""

ACTIVATION_BYTES = 34
"""Per token, layer and unit of width, with attention not materialised (Korthikanti et al. 2022)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledWork:
    """What the emulated accelerator pretends to compute in each step."""

    forward_s: float
    backward_s: float
    update_s: float
    shrink: int = 1
    """By how much bytes are smaller than the full model's, and all rates are divided: its
    parameters ÷ those of the model that is really trained. Times stay those of the full model."""
    resident_bytes: int = 0
    """Device memory that the full model's training takes by itself."""


def model_work(
    profile: Profile,
    *,
    params: int,
    tokens: int,
    layers: int,
    d_model: int,
    context: int,
    update_bytes_per_param: float = UPDATE_BYTES_PER_PARAM,
    shrink: int = 1,
    resident_bytes_per_param: float = RESIDENT_BYTES_PER_PARAM,
    model: str | None = None,
) -> ModelledWork:
    """The times of one step, from the full model's true size.

    Forward and backward together are 6·params·tokens floating-point operations for the weights, and
    6·layers·d_model·context·tokens for causal attention, a third of them forward. The update moves
    ``update_bytes_per_param`` at the device memory's achieved rate.

    Args:
        model: a name that the profile may hold a calibrated entry for, whose times are then taken
            instead. Such times hold for the job that they were taken from: leave it out for any
            other number of tokens.
    """
    attention = 6 * layers * d_model * context * tokens
    passes_s = (6 * params * tokens + attention) / profile.flops_achieved
    update_s = params * update_bytes_per_param / profile.device_memory_bandwidth
    known = None if model is None else profile.models.get(model)
    return ModelledWork(
        forward_s=passes_s / 3 if known is None else known.forward_s,
        backward_s=passes_s * 2 / 3 if known is None else known.backward_s,
        update_s=update_s if known is None else known.update_s,
        shrink=shrink,
        resident_bytes=int(
            params * resident_bytes_per_param + ACTIVATION_BYTES * tokens * layers * d_model
        ),
    )
