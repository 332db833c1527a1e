"""The models by name, in their true sizes, and the same models shrunk for emulation. Pure data.

What always holds: :func:`param_count` is exact for every preset, true or shrunk (a test compares it
with the modules), and a shrunk preset has the same layers and the same tensors as its original,
with about 1/w² of the parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from gockpt.errors import ConfigError, suggestion

BYTES = 256
"""Text is read as bytes, so no vocabulary may shrink below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model: its shape, and how the harness trains it."""

    name: str
    family: Literal["gpt", "llama"]
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than ``heads`` is grouped-query attention."""
    head_dim: int
    d_ff: int
    vocab: int
    context: int
    tied: bool
    """Whether the output layer is the token embedding itself."""
    embed_dim: int
    """Width of the token embedding; unlike ``d_model`` it needs a projection in and one out."""
    qk_norm: bool = False
    rope_theta: float = 500_000.0
    dropout: float = 0.0
    precision: Literal["fp32", "bf16-master"] = "bf16-master"
    shrink: int = 16
    """The factor w of the emulation. So large that the real update of the shrunk model stays well
    below the modelled one on a single CPU core (about 4 ns against 0.02 to 0.04 ns a parameter)."""
    tokens: int
    """Default tokens of a step; about a quarter of a second on an A100."""
    learning_rate: float = 3e-4

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def _gpt(name: str, layers: int, d_model: int, heads: int, tokens: int, **changes: int) -> Preset:
    """A GPT-3 shape (arXiv 2005.14165, table 2.1) with GPT-2's vocabulary."""
    preset = Preset(
        name=name,
        family="gpt",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        head_dim=d_model // heads,
        d_ff=4 * d_model,
        vocab=50_257,
        context=2_048,
        tied=True,
        embed_dim=d_model,
        tokens=tokens,
    )
    return dataclasses.replace(preset, **changes)  # type: ignore[arg-type]


WIDTH = 8
"""Shrunk widths are multiples of this: a CPU's vectors are of eight numbers."""

_ALL = (
    Preset(
        name="gpt-tiny",  # really trained on a CPU, so there is nothing to shrink
        family="gpt",
        layers=6,
        d_model=384,
        heads=6,
        kv_heads=6,
        head_dim=64,
        d_ff=1_536,
        vocab=BYTES,
        context=128,
        tied=True,
        embed_dim=384,
        precision="fp32",
        shrink=1,
        tokens=512,
        learning_rate=1e-3,
    ),
    _gpt("gpt-125m", 12, 768, 12, 32_768),
    _gpt("gpt-350m", 24, 1_024, 16, 16_384),
    _gpt("gpt-760m", 24, 1_536, 16, 8_192),
    _gpt("gpt-1.3b", 24, 2_048, 16, 4_096, shrink=20),
    _gpt("gpt-2.7b", 32, 2_560, 32, 2_048, shrink=20),
    _gpt("gpt-6.7b", 32, 4_096, 32, 2_048, shrink=32),
    # The table has 5,140 for its width, which its 40 heads of 128 do not make.
    _gpt("gpt-13b", 40, 5_120, 40, 2_048, shrink=40),
    # arXiv 2205.01068; its norms follow the blocks, which changes neither sizes nor times.
    # Shrunk so far as the calibrated V100S updates it in 7 ms: at 16 a CPU core takes 8.
    _gpt("opt-350m", 24, 1_024, 16, 16_384, vocab=50_272, embed_dim=512, shrink=32),
    Preset(
        name="qwen3-0.6b",
        family="llama",
        layers=28,
        d_model=1_024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        d_ff=3_072,
        vocab=151_936,
        context=32_768,
        tied=True,
        embed_dim=1_024,
        qk_norm=True,
        rope_theta=1_000_000.0,
        shrink=32,  # as opt-350m: 12.5 ms
        tokens=8_192,
    ),
    Preset(
        name="llama-3.2-1b",
        family="llama",
        layers=16,
        d_model=2_048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        d_ff=8_192,
        vocab=128_256,
        context=8_192,
        tied=True,
        embed_dim=2_048,
        tokens=4_096,
    ),
    Preset(
        name="llama-3-8b",
        family="llama",
        layers=32,
        d_model=4_096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        d_ff=14_336,
        vocab=128_256,
        context=8_192,
        tied=False,
        embed_dim=4_096,
        shrink=32,
        tokens=2_048,
    ),
    Preset(
        name="gpt-nano",  # for crash tests: whole trials of it take seconds
        family="gpt",
        layers=3,
        d_model=96,
        heads=3,
        kv_heads=3,
        head_dim=32,
        d_ff=384,
        vocab=BYTES,
        context=64,
        tied=True,
        embed_dim=96,
        precision="fp32",
        shrink=1,
        tokens=64,
        learning_rate=1e-3,
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def find_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigError: no such preset; names the nearest one.
    """
    if name in PRESETS:
        return PRESETS[name]
    hint = suggestion(name.lower(), PRESETS, cutoff=0.5)
    raise ConfigError(f"no model named {name!r}; {hint}")


def shrunk(preset: Preset, factor: int | None = None) -> Preset:
    """The same model with widths, vocabulary and context divided by about ``factor``.

    Widths become the nearest multiples of :data:`WIDTH`. ``factor`` defaults to the preset's own.
    Layers stay, the ratio of query to key heads stays, and heads go before their size does (fewer,
    larger heads cost a CPU less).

    Raises:
        ConfigError: the factor leaves nothing of a width.
    """
    w = preset.shrink if factor is None else factor
    least = min(preset.d_model, preset.d_ff, preset.embed_dim, preset.kv_dim)
    if not 1 <= w <= least // WIDTH:
        raise ConfigError(
            f"{preset.name} cannot be shrunk by {w}; use 1 to {least // WIDTH}, which leaves its "
            f"narrowest width, {least}, at {WIDTH}"
        )
    kv_dim = _narrowed(preset.kv_dim, w)
    kv_heads = max(1, preset.kv_heads // w)
    while kv_dim % kv_heads:
        kv_heads -= 1
    return dataclasses.replace(
        preset,
        d_model=_narrowed(preset.d_model, w),
        embed_dim=_narrowed(preset.embed_dim, w),
        d_ff=_narrowed(preset.d_ff, w),
        heads=kv_heads * (preset.heads // preset.kv_heads),
        kv_heads=kv_heads,
        head_dim=kv_dim // kv_heads,
        vocab=max(BYTES, -(-preset.vocab // w)),
        context=-(-preset.context // w),
        shrink=1,
    )


def _narrowed(width: int, factor: int) -> int:
    return max(1, round(width / factor / WIDTH)) * WIDTH


def param_count(preset: Preset) -> int:
    """Parameters of the model, each shared one counted once."""
    p = preset
    embedding = p.vocab * p.embed_dim * (1 if p.tied else 2)
    projections = 2 * p.embed_dim * p.d_model if p.embed_dim != p.d_model else 0
    matrices = p.d_model * (2 * p.q_dim + 2 * p.kv_dim)
    if p.family == "gpt":
        matrices += 2 * p.d_model * p.d_ff
        biases = p.q_dim + 2 * p.kv_dim + p.d_model + p.d_ff + p.d_model
        block, rest = matrices + biases + 4 * p.d_model, p.context * p.d_model + 2 * p.d_model
    else:
        matrices += 3 * p.d_model * p.d_ff
        block, rest = matrices + 2 * p.d_model + 2 * p.head_dim * p.qk_norm, p.d_model
    return embedding + projections + p.layers * block + rest
