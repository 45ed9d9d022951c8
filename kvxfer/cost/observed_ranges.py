"""What an observation may say, and from where to where: no transfer of a KV cache is outside."""

from __future__ import annotations

MS = (1e-6, 1e9)

RANGES = {"ms": MS, "bytes": (1.0, 1e18), "descriptors": (1.0, 1e12), "post_ms": MS, "wire_ms": MS}
"""The least and the most of each figure."""
