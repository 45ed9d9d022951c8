"""What the ratio assumes and nobody measured here. Shown as assumptions wherever the ratio is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.model.dtypes import DType
from kvxfer.model.shape import ModelShape, whole_block_tokens


@dataclass(frozen=True)
class Assumptions:
    """The prefill group, the links, and what overrides the model's own figures (None: the model's).

    eff_tflops is what one GPU sustains, in 10¹² FLOP/s. link_gbit are line rates in Gbit/s. params counts the
    parameters of the `seed` row, params_active those of the `full` row (embedding tables included, as model cards
    count). kv_bytes_per_token are bytes on the wire, for example with heads replicated over ranks.
    """

    gpus: int = 4
    eff_tflops: float = 400.0
    params: float | None = None
    params_active: float | None = None
    link_gbit: tuple[float, ...] = (100.0, 200.0, 400.0)
    kv_bytes_per_token: int | None = None

    def seed_params(self, shape: ModelShape) -> tuple[float, str] | None:
        """Parameters of the seed row and their source: --params, --params-active, or the model's active ones."""
        if self.params is not None:
            return self.params, "--params"
        return self.full_params(shape)

    def full_params(self, shape: ModelShape) -> tuple[float, str] | None:
        """Active parameters of the full row and their source: --params-active or the model's.

        --params alone does not count here: for a mixture of experts it would be many times too much work.
        """
        if self.params_active is not None:
            return self.params_active, "--params-active"
        return (float(shape.params_active), "the model's") if shape.params_active is not None else None

    def request_bytes(self, shape: ModelShape, tokens: int, block_size: int, dtype: DType) -> int:
        """Bytes on the wire of a prompt, whole blocks."""
        if self.kv_bytes_per_token is None:
            return shape.request_bytes(tokens, block_size, dtype)
        return whole_block_tokens(tokens, block_size) * self.kv_bytes_per_token

    def as_record(self, shape: ModelShape) -> dict[str, Any]:
        """The result file's `assumptions`."""
        params, source = self.seed_params(shape) or (None, None)
        return {
            "gpus": self.gpus,
            "eff_tflops": self.eff_tflops,
            "params": params,
            "params_source": source,
            "link_gbit": list(self.link_gbit),
        }
