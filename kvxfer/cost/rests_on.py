"""The assumptions that a finding may rest on, and what would settle each."""

from __future__ import annotations

PREFILL, LAYERS, LINE_RATE, REACH, MODEL, SENDS = "prefill", "layers", "line rate", "reach", "model", "sends"
LENGTHS, ARRIVALS, ENGINES, CHUNKS, STEP = "lengths", "arrivals", "engines", "chunks", "decode step"

SETTLED_BY = {
    PREFILL: "the prefill time is assumed: time your engine's prefill, --prefill-csv or --prefill-tokens-per-s",
    LAYERS: "the prefill is that of layers of random weights without an engine: time your engine's, --prefill-csv or "
    "--prefill-tokens-per-s",
    LINE_RATE: "the path is assumed at line rate, with its α and γ: kvxfer bench --fit --peer between the two hosts, "
    "then --measured",
    REACH: "the measurement does not reach all prompts of this cache: kvxfer bench --peer with this model and dtype, "
    "and --tokens from the shortest prompt to the longest",
    MODEL: "what pipelining hides is by a model: kvxfer bench --peer with --pipeline between the two hosts, behind "
    "your prefill's time (--compute timed:MS), measures it",
    SENDS: "what pipelining hides is not counted, as its sends are assumed to cost nothing beside their bytes: "
    "--send-ms and --gamma-us, or kvxfer bench --fit --peer between the two hosts, then --measured",
    LENGTHS: "the prompts are those of --tokens, equally often: --lengths with a trace of your requests",
    ARRIVALS: "the requests are assumed to arrive independently of each other: --lengths with a trace with timestamps",
    ENGINES: "one colocated engine is assumed to take all requests: --total-gpus",
    CHUNKS: "only the usual chunk sizes of colocated prefill were looked at: --chunk with all that your engine can run",
    STEP: "the decode step is taken as equally long on colocated engines and on the split's, which may have more "
    "sequences each: time it at the split's batch, and see whether the answer holds with that --decode-step-ms",
}
