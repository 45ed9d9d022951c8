"""What `kvxfer plan` adds to a result, as it would write it for 8 GPUs under a light load."""

from __future__ import annotations

from typing import Any


def example_plan() -> dict[str, Any]:
    """A fresh copy, free to be changed."""
    return {
        "load": {
            "source": "the prompts of --tokens, equally often",
            "requests": 1,
            "prompt_tokens": {"mean": 8192.0, "p50": 8192, "p90": 8192, "p99": 8192, "max": 8192},
            "output_tokens": 300.0,
            "requests_per_s": 0.5,
            "arrivals": "poisson",
            "burstiness": None,
        },
        "wanted": {"objective": "latency", "itl_target_ms": 60.0, "decode_step_ms": 30.0},
        "prefill_source": "assumed: 2·70e9·N FLOP on 4 GPUs at 400 TFLOP/s each",
        "stalls": [
            {
                "tokens": 8192,
                "basis": "seed",
                "prompt_ms": 716.8,
                "chunks": [{"chunk_tokens": 512, "stall_ms": 44.8}],
            }
        ],
        "colocated": {
            "instances": 2,
            "basis": "seed",
            "modes": [
                {
                    "chunk_tokens": None,
                    "busy": 0.179,
                    "overloaded": False,
                    "stalled": 0.0075,
                    "stall_mean_ms": 6.5,
                    "stall_p99_ms": 0.0,
                    "stall_max_ms": 2867.2,
                    "itl_p99_ms": 30.0,
                }
            ],
        },
        "split": [
            {
                "dtype": "bf16",
                "path": "100 Gb/s line rate",
                "measured": False,
                "reached": None,
                "gbit": 100.0,
                "percent": 29.95,
                "median_ms": 214.7,
                "p99_ms": 214.7,
                "exposed_ms": None,
                "setup_ms": None,
                "busy": 0.107,
                "busy_side": None,
            }
        ],
        "pools": {
            "total_gpus": 8,
            "concurrency": 4.5,
            "prefill": {"gpus": 4, "gpus_per_instance": 4, "instances": 1, "busy": 0.358, "wait_ms": 200.1},
            "decode": {"gpus": 4, "gpus_per_instance": 4, "instances": 1, "busy": 0.989, "batch": 4.5},
            "cache": [
                {
                    "dtype": "bf16",
                    "bytes_per_sequence": 2_736_783_360,
                    "needed_bytes": 12_315_525_120,
                    "available_bytes": None,
                }
            ],
        },
    }
