"""A complete result, as a loopback run of three rows (one of them failed) would write it, with a plan's part."""

from __future__ import annotations

from typing import Any

from example_plan import example_plan

from kvxfer.result.cold import cold_pair

PHASES = ("library", "context", "allocate", "register", "connect", "exchange", "prepare", "first", "other")
PHASE_NS = (1_200_000, 800_000, 310_000_000, 40_000, 2_100_000, 350_000, 9_000_000, 260_000_000, 61_000_000)


def example_result() -> dict[str, Any]:
    """A fresh copy, free to be changed."""
    return {
        "schema_version": 1,
        "kvxfer_version": "0.1.0",
        "created_utc": "2026-01-31T12:00:00Z",
        "command": ["kvxfer", "bench", "--model", "70b", "--backend", "tcp", "--tokens", "512,8192,131072"],
        "scope": "loopback",
        "exit_status": 3,
        "host": host("alpha"),
        "peer": host("alpha"),
        "assumptions": {
            "gpus": 4,
            "eff_tflops": 400.0,
            "params": None,
            "params_source": "the model's",
            "link_gbit": [100.0, 200.0, 400.0],
        },
        "models": [
            {
                "name": "llama-3.1-70b",
                "family": "llama",
                "dtype": "bf16",
                "params_total": 70_553_706_496,
                "params_active": 69_503_033_344,
                "layers": 80,
                "kv_bytes_per_token": 327_680,
                "fixed_bytes_per_request": 0,
                "bytes_by_tokens": {"512": 167_772_160, "8192": 2_684_354_560},
            }
        ],
        "results": [ok_row(512, 52_400_000), ok_row(8192, 912_000_000), error_row(131072)],
        "references": [
            reference("tcp-512", "memcpy", 167_772_160, 27_100_000),
            reference("tcp-512", "bulk", 167_772_160, 44_000_000),
            reference("tcp-8192", "memcpy", 2_684_354_560, 431_000_000),
            reference("tcp-8192", "bulk", 2_684_354_560, 801_000_000),
        ],
        "cost_model": [cost_model()],
        "prefill": [prefill()],
        "ratio": [
            {
                "model": "llama-3.1-70b",
                "dtype": "bf16",
                "tokens": 8192,
                "basis": "seed",
                "bytes": 2_684_354_560,
                "prefill_ms": 716.8,
                "prefill_source": "2·params·tokens / (4 GPUs × 400 TFLOP/s)",
                "links": [{"line_gbit": 100.0, "transfer_ms": 214.7, "percent": 29.95}],
                "measured": [
                    {
                        "of": "tcp-8192",
                        "backend": "tcp",
                        "op": "push",
                        "scope": "loopback",
                        "transfer_ms": 912.0,
                        "percent": 127.2,
                        "cold_ms": 1644.0,
                        "cold_percent": 229.4,
                        "cold_pair_ms": 1271.5,
                        "cold_pair_longest_ms": 1298.0,
                        "cold_pair_percent": 177.4,
                        "cold_pair_over_steady": 1.394,
                        "exposed_ms": None,
                        "exposed_percent": None,
                    }
                ],
            }
        ],
        "plan": example_plan(),
        "verdict": None,
        "notices": ["a loopback run: no verdict is drawn from it"],
    }


def prefill() -> dict[str, Any]:
    return {
        "model": "llama-3.1-70b",
        "tokens": 512,
        "computed_tokens": 512,
        "total_ns": 240_000_000_000,
        "least_ns": 232_000_000_000,
        "most_ns": 256_000_000_000,
        "source": "measured here, no GPU's time",
        "how": "float32 on 2 CPU threads",
        "on_gpu": False,
        "devices": 1,
        "kinds": [
            {"what": "full attention", "layers": 80, "samples_ns": [3_200_000_000, 2_900_000_000, 3_000_000_000]}
        ],
        "flop": 7.0e13,
        "peak_flop_s": 4.0e11,
        "mfu": 0.73,
    }


def cost_model() -> dict[str, Any]:
    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "ci95": [0.9 * value, 1.1 * value]}

    def point(role: str, size: int, p50_ns: int, predicted_ns: int, inflight: int = 1) -> dict[str, Any]:
        return {
            "role": role,
            "tokens": size // 327_680,
            "block_size": 16,
            "fragmentation": 1.0,
            "inflight": inflight,
            "descriptors": size // 65_536,
            "bytes": size,
            "process_ns": [p50_ns - 10_000, p50_ns, p50_ns + 10_000],
            "setup": {
                f"{phase}_ns": {"p50": ns, "max": ns + 10_000, "samples": [ns - 10_000, ns, ns + 10_000]}
                for phase, ns in (
                    ("connect", 1_200_000),
                    ("exchange", 800_000),
                    ("prepare", 1_000_000),
                    ("first", p50_ns),
                )
            },
            "p50_ns": p50_ns,
            "predicted_ns": predicted_ns,
        }

    return {
        "model": "llama-3.1-70b",
        "dtype": "bf16",
        "backend": "tcp",
        "op": "push",
        "scope": "loopback",
        "transport": "tcp/lo",
        "options": {},
        "noisy_share": 0.25,
        "form": "sum",
        "alpha_ns": figure(63_700.0),
        "latency_ns": figure(27_200.0),
        "occupancy_ns": figure(36_500.0),
        "gamma_ns": figure(151.0),
        "beta_gbyte_s": {"value": 5.29, "ci95": [5.13, None]},
        "bands": [
            {"from_bytes": 0, "beta_gbyte_s": figure(9.1), "step_ns": 0},
            {"from_bytes": 4_194_304, "beta_gbyte_s": {"value": 5.29, "ci95": [5.13, None]}, "step_ns": 20_500.0},
        ],
        "processes": 3,
        "chosen_from": [
            {"form": "sum", "breaks": [], "error_percent": 8.1},
            {"form": "sum", "breaks": [4_194_304], "error_percent": 3.9},
        ],
        "held_out": {"requests": 1, "median_percent": 3.2, "worst_percent": 3.2},
        "valid": {"bytes": [5_242_880, 83_886_080], "descriptors": [80, 1_280], "inflight": 4},
        "points": [
            point("fit", 5_242_880, 1_100_000, 1_120_000),
            point("held_out", 41_943_040, 8_000_000, 8_256_000),
            point("inflight", 5_242_880, 1_000_000, 1_010_000, inflight=4),
        ],
        "cold": {
            "form": "sum",
            "alpha_ns": figure(3_100_000.0),
            "gamma_ns": figure(1_050.0),
            "beta_gbyte_s": figure(4.2),
            "bands": [{"from_bytes": 0, "beta_gbyte_s": figure(4.2), "step_ns": 0}],
            "held_out": {"requests": 1, "median_percent": 6.1, "worst_percent": 6.1},
            "spread": [0.8, 1.4],
        },
    }


def host(name: str) -> dict[str, Any]:
    return {
        "hostname": name,
        "kernel": "6.1.0-31-amd64",
        "cpu_model": "AMD EPYC 7763 64-Core Processor",
        "cpus": 8,
        "memory_bytes": 64 * 2**30,
        "llc_bytes": 32 * 2**20,
        "kvxfer_version": "0.1.0",
        "python": "3.11.7",
        "load_average": 0.21,
    }


def error_row(tokens: int) -> dict[str, Any]:
    """A row that was not measured: what was asked for, and why there is no answer."""
    return {
        "id": f"tcp-{tokens}",
        "status": "error",
        "error": "the pool takes 80.0 GiB and 55.1 GiB are free; fewer --tokens or --inflight would fit",
        "model": "llama-3.1-70b",
        "dtype": "bf16",
        "backend": "tcp",
        "scope": "loopback",
        "op": "push",
        "device": "cpu",
        "tokens": tokens,
        "block_size": 16,
        "layout": "nhd",
        "fragmentation": 1.0,
        "regions_per_layer": 1,
        "tp": {"prefill": 1, "decode": 1},
        "pp": {"prefill": 1, "decode": 1},
        "inflight": 1,
    }


def ok_row(tokens: int, p50_ns: int) -> dict[str, Any]:
    """A measured row of seven samples around `p50_ns`."""
    moved = tokens * 327_680
    samples = [p50_ns + step * p50_ns // 400 for step in (-3, 2, -1, 0, 1, 3, -2)]
    measured = {
        "status": "ok",
        "error": None,
        "loop": "native",
        "transport": "tcp/lo",
        "library": {"path": "", "version": "kernel sockets"},
        "bytes": moved,
        "descriptors": tokens // 16 * 80,
        "plans": 4,
        "samples_ns": samples,
        "post_ns": [41_000] * 7,
        "p50_ns": p50_ns,
        "p90_ns": None,
        "p99_ns": None,
        "min_ns": min(samples),
        "max_ns": max(samples),
        "ci95_ns": [min(samples), max(samples)],
        "converged": True,
        "warmup": {"samples": 10, "wall_ns": 10 * p50_ns, "agreed": True},
        "bandwidth_gbyte_s": moved / p50_ns,
        "handover": {"p50_ns": p50_ns + 180_000, "p90_ns": None, "p99_ns": None, "samples_ns": [p50_ns + 180_000] * 7},
        "control_rtt_ns": 95_000,
        "setup": setup(),
        "cold_pair_ns": cold_pair(setup()),
        "cpu_s_per_gib": {"prefill": 0.31, "decode": 0.44},
        "verified": "full",
        "verified_bytes": 2 * moved,
        "hot": False,
        "noisy": False,
        "other_cpu_share": 0.01,
        "pipeline": None,
        "options": {"connections": 2},
        "held_tokens": 0,
    }
    return error_row(tokens) | measured


def setup() -> dict[str, Any]:
    """Five repetitions; the phases of each sum to its cold_ns."""
    repeats = {phase: [ns + i * ns // 50 for i in range(5)] for phase, ns in zip(PHASES, PHASE_NS, strict=True)}
    repeats["cold"] = [sum(of_one) for of_one in zip(*repeats.values(), strict=True)]
    return {
        f"{phase}_ns": {"p50": sorted(samples)[2], "max": max(samples), "samples": samples}
        for phase, samples in repeats.items()
    }


def reference(of: str, kind: str, moved: int, p50_ns: int) -> dict[str, Any]:
    return {
        "of": of,
        "kind": kind,
        "bytes": moved,
        "descriptors": 1,
        "threads": 1,
        "p50_ns": p50_ns,
        "bandwidth_gbyte_s": moved / p50_ns,
        "samples_ns": [p50_ns] * 5,
    }
