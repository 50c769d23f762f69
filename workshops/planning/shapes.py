"""The dense decoders of a plan, from their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.family_configs import FamilyConfig, family_of
from tandem.checkpoints.json_files import read_object

DENSE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A dense Llama-like decoder. `kept`: parts of the names of modules without eight-bit weights; None: all are."""

    name: str
    config: FamilyConfig
    kept: tuple[str, ...] | None = None
    bytes_each: int = 2

    def eight_bit(self, module: str) -> bool:
        return self.kept is not None and not any(part in module for part in self.kept)

    @property
    def norm_parameters(self) -> int:
        """Those of queries and keys (Qwen3) are of a head's size."""
        each = 2 * self.config.hidden_size + (2 * self.config.head_dim if self.config.family.head_norms else 0)
        return self.config.num_hidden_layers * each + self.config.hidden_size

    @property
    def parameters(self) -> int:
        """As published: a tied output matrix counts once."""
        biases = sum(self.config.shape(name)[0] for name in self.config.biases)
        return self.config.parameters + self.config.num_hidden_layers * biases + self.norm_parameters


def read_shape(folder: str, field: str) -> DecoderShape:
    """The shape of the model in `folder`; `field`: the flag in errors. Raises ValueError, one line."""
    if holds_head(folder):
        raise ValueError(f"{field}: {folder}: an EAGLE head; a plan counts whole models alone")
    path = Path(folder)
    path = path if path.name == "config.json" else path / "config.json"
    try:
        config = read_object(path)
    except OSError:
        raise ValueError(f"{field}: {path} is not there; a plan reads a model folder's config.json") from None
    except ValueError as error:
        raise ValueError(f"{field}: {path} is not a model's configuration: {error}") from None
    try:
        return shape_of(config, path.parent.name)
    except ValueError as error:
        raise ValueError(f"{field}: {path}: {error}") from None


def holds_head(folder: str) -> bool:
    """Whether `folder` has an EAGLE-3 head; False if unreadable, which loading reports."""
    from tandem.checkpoints.head_config import is_head  # lazy: numpy, which --help does not need

    return is_head(Path(folder))


def shape_of(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Raises ValueError with the missing or invalid key."""
    if (kind := config.get("model_type")) not in DENSE:
        raise ValueError(f"model_type: {kind!r} is not one of {', '.join(DENSE)}, the dense decoders of a plan")
    return DecoderShape(name, family_of(config), _kept(config.get("quantization_config")))


def _kept(config: object) -> tuple[str, ...] | None:
    """Names of an eight-bit checkpoint's other modules. Raises ValueError for another quantization."""
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or method not in ("fbgemm_fp8", "fp8"):
        raise ValueError(f"quantization_config.quant_method: {method!r} is not fbgemm_fp8 or fp8")
    names = config.get("modules_to_not_convert") or ()
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"quantization_config.modules_to_not_convert: {name!r} is not a name")
    return tuple(names)
