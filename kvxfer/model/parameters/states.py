"""The weights of layers with a recurrent state: gated delta nets and Mamba-2."""

from __future__ import annotations

from kvxfer.model.families import mamba_hybrid, nemotron_h
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.fields import Fields
from kvxfer.model.parameters.weights import linear


def gated_delta(fields: Fields, hidden: int) -> int:
    """q, k, v and gate in, two weights per head, the convolution, decay and its bias, a norm, and the output."""
    heads, value_dim = fields.positive("linear_num_value_heads"), fields.positive("linear_value_head_dim")
    keys = fields.positive("linear_num_key_heads") * fields.positive("linear_key_head_dim")
    values = heads * value_dim
    convolution = (2 * keys + values) * fields.positive("linear_conv_kernel_dim")
    made = 2 * keys + 2 * values + 2 * heads
    return linear(hidden, made) + convolution + 2 * heads + value_dim + linear(values, hidden)


def mamba2(mamba: Mamba2, hidden: int, conv_bias: bool, linear_bias: bool) -> int:
    """Gate, x, B, C and dt in, the convolution, three weights per head (A, D, dt's bias), a norm, and the output."""
    made = mamba.inner + mamba.conv_dim + mamba.heads
    count = linear(hidden, made, linear_bias) + linear(mamba.inner, hidden, linear_bias)
    return count + mamba.conv_dim * (mamba.kernel + conv_bias) + 3 * mamba.heads + mamba.inner


def granite_state(fields: Fields, hidden: int) -> int:
    """Granite-4's and Bamba's."""
    biases = fields.flag("mamba_conv_bias", True), fields.flag("mamba_proj_bias", False)
    return mamba2(mamba_hybrid.read_mamba(fields), hidden, *biases)


def nemotron_state(fields: Fields, hidden: int) -> int:
    """Nemotron-H's, which goes by use_bias: engines pass over its mamba_proj_bias."""
    biases = fields.flag("use_conv_bias", True), fields.flag("use_bias", False)
    return mamba2(nemotron_h.read_mamba(fields), hidden, *biases)
