"""Rotary frequencies by a config's rope_theta and rope_scaling: how models are stretched beyond the lengths they learnt.

Everything is worked out once in NumPy, when a model is built; the graph sees frequencies and one factor.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.layers import Rope
from poptransformer.models.config import LARGEST_NUMBER, read_bool

# Type -> keys it must have, and those it may have with what stands for a missing one.
KINDS = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "dynamic": (("factor",), {}),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), {}),
    "factors": (("factors",), {}),  # ours, not Hugging Face's: what GGUF files have in place of llama3's numbers
    "yarn": (
        (),
        {"factor": None, "attention_factor": None, "beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None},
    ),
}

LARGEST_HEAD_DIM = 1 << 16  # frequencies beyond take memory and minutes, and mean a damaged config


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """What a config says about rotary positions.

    Attributes:
      kind: "default" (no scaling), "linear", "dynamic", "llama3", "factors" (a divisor for each frequency) or "yarn".
      theta: base of the angles.
      max_seq_len: the config's max_position_embeddings.
      original_length: positions that the model learnt before it was stretched (llama3, yarn).
      numbers: the kind's own settings, under their keys in the file.
      is_truncated: whether yarn rounds the ends of its ramp (HF: truncate).
      rotary_share: share of a head's features, the leading ones, that turn (HF: partial_rotary_factor).
    """

    kind: str
    theta: float
    max_seq_len: int
    original_length: int
    numbers: dict[str, float | list[float] | None]
    is_truncated: bool = True
    rotary_share: float = 1.0

    @classmethod
    def from_hf(cls, config: dict, max_seq_len: int, default_share: float | None = None) -> RopeScaling:
        """Read a config.json, with keys of before transformers 5 (rope_theta, rope_scaling) or since (rope_parameters).

        Args:
          default_share: for a family whose heads turn in part, the share of features that turns where the file has no
            partial_rotary_factor; None for one whose heads turn whole.
        Raises: UnsupportedError for a type that is not known, features that turn in part where the family's don't, or
          settings that differ by layer; UserError for keys that are missing or no numbers.
        """
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, dict):
            raise UserError(f"config.json: rope_scaling={given!r}: wanted a group of keys")
        if any(isinstance(value, dict) for value in given.values()):
            raise UnsupportedError("config.json: rope_parameters that differ by the kind of layer are not supported")
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str) or kind not in KINDS:
            raise UnsupportedError(f"config.json: rope_scaling of type {kind!r} is not supported; there are {', '.join(KINDS)}")
        shares = [source["partial_rotary_factor"] for source in (given, config)
                  if source.get("partial_rotary_factor") is not None]  # fmt: skip
        if default_share is None and any(share != 1 for share in shares):
            raise UnsupportedError("config.json: partial_rotary_factor is not supported for this family; every feature turns")
        share = next(iter(shares), default_share or 1)
        if not _is_positive(share, False) or share > 1:
            raise UserError(f"config.json: partial_rotary_factor={share!r}: wanted a number above 0, at most 1")
        theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
        original = next(
            (source["original_max_position_embeddings"] for source in (config, given)
             if source.get("original_max_position_embeddings") is not None), max_seq_len,
        )  # fmt: skip
        required, optional = KINDS[kind]
        numbers = {key: given.get(key) for key in required}
        numbers |= {key: default if given.get(key) is None else given[key] for key, default in optional.items()}
        checked = {"rope_theta": theta, "original_max_position_embeddings": original} | numbers
        if kind == "factors":
            checked |= _numbered("factors", checked.pop("factors"))
        wrong = [f"{key}={value!r}" for key, value in checked.items() if not _is_positive(value, key in optional)]
        if wrong:
            raise UserError(f"config.json: rope_scaling of type {kind!r}: wanted positive numbers for {', '.join(wrong)}")
        return cls(kind, theta, max_seq_len, original, numbers, read_bool(given, "truncate", True), share)

    def rope(self, head_dim: int, max_length: int) -> Rope:
        """Frequencies for heads of `head_dim` features, in rows of up to `max_length` positions.

        Raises: UserError if an odd number of features would turn, or none; UnsupportedError for dynamic scaling beyond
          max_position_embeddings.
        """
        if head_dim > LARGEST_HEAD_DIM:
            raise UserError(f"config.json: head_dim={head_dim} is more than any model has; at most {LARGEST_HEAD_DIM}")
        rotary_dim = int(head_dim * self.rotary_share)
        if rotary_dim % 2 or not rotary_dim:
            what = "it" if self.rotary_share == 1 else f"its share of {self.rotary_share}, which is {rotary_dim},"
            raise UserError(f"head_dim={head_dim}: rotary positions turn pairs of features, so {what} must be even")
        if self.kind == "dynamic" and max_length > self.max_seq_len:
            raise UnsupportedError(f"max_length={max_length}: {self.why_not_longer}; set at most {self.max_seq_len}")
        # As transformers does: in float32 from the exponents on, so that long texts turn by the same angles.
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        inv_freq = np.float32(1) / np.float32(self.theta) ** exponents
        if self.kind == "linear":
            return Rope(inv_freq / np.float32(self.numbers["factor"]))
        if self.kind == "factors":
            factors = np.asarray(self.numbers["factors"], np.float32)
            if len(factors) != len(inv_freq):
                raise UserError(f"rope_scaling has {len(factors)} factors for the {len(inv_freq)} pairs of head_dim={head_dim}")
            return Rope(inv_freq / factors)
        if self.kind == "llama3":
            return Rope(_llama3(inv_freq, self.original_length, **self.numbers))
        if self.kind == "yarn":
            factor = self.numbers["factor"] or self.max_seq_len / self.original_length
            return Rope(self._yarn(inv_freq, factor), self._yarn_attention_scale(factor))
        return Rope(inv_freq)  # dynamic too: up to max_position_embeddings it changes nothing

    @property
    def why_not_longer(self) -> str:
        """Why rows end at max_position_embeddings where scaling is meant to go beyond; empty for other kinds."""
        if self.kind != "dynamic":
            return ""
        return (
            f"rope_scaling of type 'dynamic' beyond max_position_embeddings={self.max_seq_len} is not supported, "
            "as keys in the cache would have to turn anew with every token"
        )

    def _yarn(self, inv_freq, factor):
        """Slow pairs are divided by the factor, fast ones stay, a ramp between. Source: Peng et al. 2023, arXiv:2309.00071."""
        rotary_dim = 2 * len(inv_freq)

        def pair_with(num_turns):  # index of the pair that turns so often over the original length
            return rotary_dim * math.log(self.original_length / (num_turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_with(self.numbers["beta_fast"]), pair_with(self.numbers["beta_slow"])
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        high = high + 0.001 if low == high else high
        slowness = np.clip((np.arange(len(inv_freq), dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
        return inv_freq / np.float32(factor) * slowness + inv_freq * (1 - slowness)

    def _yarn_attention_scale(self, factor):
        def scale(mscale):
            return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

        given, mscale, over = (self.numbers[key] for key in ("attention_factor", "mscale", "mscale_all_dim"))
        if given is not None:
            return given
        return scale(mscale) / scale(over) if mscale and over else scale(1)


def _llama3(inv_freq, original_length, factor, low_freq_factor, high_freq_factor):
    """Long waves are divided by the factor, short ones stay, a blend between. Source: Llama 3.1, HF modeling_rope_utils.py."""
    turns = original_length * inv_freq / np.float32(2 * math.pi)  # over the original length
    share = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return ((1 - share) * inv_freq / factor + share * inv_freq).astype(np.float32)


def _numbered(key, values):
    """Entries of a list under names of their own; what is no list is a missing one."""
    return {f"{key}[{i}]": value for i, value in enumerate(values)} if isinstance(values, list) else {key: None}


def _is_positive(value, may_be_missing):
    if value is None:
        return may_be_missing
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LARGEST_NUMBER
