"""Per-layer pipelining of a row: each way to cut it, serial among them, in turn, beside compute and transfer alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.cache.sends import Cut, chunk_lengths, send_ends
from kvxfer.control.messages import Pipelined
from kvxfer.cost.pipeline import Link, Ready, best_layers, break_even_tokens, computed_sends, exposed_ns, fit_link
from kvxfer.errors import UnavailableError
from kvxfer.measure.layers import LayerTimes
from kvxfer.measure.pair import Pair
from kvxfer.measure.prefill import Computed
from kvxfer.measure.request import Effort, Pipelining
from kvxfer.model.widths import shares
from kvxfer.result import statistics

Times = npt.NDArray[np.int64]

FEWEST_ROUNDS = 3
"""However little time there is: of fewer, one slow request could be the median."""

LONGEST_REQUEST_S = 20.0
"""The most that all real layers of a prompt may take: a row computes it some dozen times."""


class Series:
    """What is measured of one cut, a sample for each round."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.runs: list[Pipelined] = []
        self.alone_ns: list[int] = []  # the same sends without compute

    @property
    def sends(self) -> int:
        return len(self.runs[0].ready_after)

    @property
    def total_ns(self) -> list[int]:
        return [_first(run.total_ns) for run in self.runs]

    @property
    def compute_ns(self) -> list[int]:
        return [_first(run.compute_ns) for run in self.runs]

    def medians(self, name: str) -> list[int]:
        """Of each send, over the samples."""
        rows = np.stack([np.frombuffer(getattr(run, name), np.int64) for run in self.runs])
        return [round(float(one)) for one in np.median(rows, axis=0)]


class PipelineRun:
    """The cuts of one row, sampled in turn."""

    def __init__(self, pair: Pair, asked: Pipelining, effort: Effort) -> None:
        self._pair = pair
        self._asked = asked
        self._effort = effort
        self._tokens = pair.row.tokens
        self._layers = pair.row.layers
        self._layer_ns = asked.layer_ns.get(self._tokens, 0)
        self._source = asked.source
        self._order: tuple[int, ...] = ()  # the kind of each layer, where real ones are computed
        self._built: dict[str, Any] = {}
        self._series = [Series(cut) for cut in self._cuts()]
        self._compute_ns: dict[int | None, list[int]] = {series.cut.chunk_tokens: [] for series in self._series}
        self._part: list[tuple[int, int]] = []  # bytes and ns of one layer's send alone

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Every cut once, verified; then rounds of all of them. Returns the row's `pipeline`."""
        if self._asked.compute == "layers":
            say(f"{self._pair.row.id}: pipelining, building layers")
            self._build_layers()
        for series in self._series:
            say(f"{self._pair.row.id}: pipelining, verifying {series.cut}")
            self._pair.run_verified(partial(self._pipelined, series.cut))
        began, rounds = time.monotonic(), 0
        rng = random.Random(self._pair.row.seed)
        while rounds < FEWEST_ROUNDS or (
            rounds < self._effort.min_samples and time.monotonic() - began < self._effort.max_seconds
        ):
            say(f"{self._pair.row.id}: pipelining, round {rounds + 1}")
            self._round(rng)
            rounds += 1
        self._pair.run_verified(lambda: self._pipelined(self._series[-1].cut))
        return self._record()

    def _build_layers(self) -> None:
        """Raises UnavailableError when a prompt would take too long."""
        row = self._pair.row
        candidates = shares(row.shape, row.prefill.tp)
        built = self._pair.build_layers(candidates)
        times = LayerTimes(built.samples_ns, built.peak_flop_s, built.how, built.on_gpu)
        computed = Computed(row.shape, candidates[built.share], times, self._tokens)
        if computed.total_ns > LONGEST_REQUEST_S * 1e9:
            raise UnavailableError(
                f"{self._layers} layers take {computed.total_ns / 1e9:.0f} s for {self._tokens} tokens in {built.how}, "
                f"and at most {LONGEST_REQUEST_S:.0f} s is measured; lower --tokens, or give --compute timed or spin"
            )
        self._order = computed.share.order
        self._layer_ns = computed.total_ns // self._layers
        self._source = computed.source
        self._built = computed.as_record()

    def _cuts(self) -> list[Cut]:
        """Those asked for, as far as they differ for this prompt, and serial."""
        cuts = [
            Cut(cut.layers, cut.chunk_tokens if cut.chunk_tokens and cut.chunk_tokens < self._tokens else None)
            for cut in self._asked.cuts
        ]
        return list(dict.fromkeys([*cuts, Cut(self._layers)]))

    def _round(self, rng: random.Random) -> None:
        """Each thing once, in an order of chance: what comes before something must not always be the same."""
        things: list[Callable[[], None]] = [self._one_layer_alone]
        for chunk_tokens in self._compute_ns:
            things.append(partial(self._compute_alone, chunk_tokens))
        for series in self._series:
            things.append(partial(self._run_once, series))
            things.append(partial(self._move_alone, series))
        rng.shuffle(things)
        for thing in things:
            thing()

    def _run_once(self, series: Series) -> None:
        series.runs.append(self._pipelined(series.cut))

    def _move_alone(self, series: Series) -> None:
        """The sends of a cut with nothing to wait for."""
        nothing = [0] * len(self._chunk_ns(series.cut))
        series.alone_ns.append(_first(self._pair.pipelined(series.cut, nothing).total_ns))

    def _pipelined(self, cut: Cut) -> Pipelined:
        return self._pair.pipelined(cut, self._chunk_ns(cut), self._asked.compute, order=self._order)

    def _compute_alone(self, chunk_tokens: int | None) -> None:
        """In the chunks of a cut: what chunks cost or gain is not the transfer's doing."""
        cut = Cut(self._layers, chunk_tokens)
        run = self._pair.pipelined(cut, self._chunk_ns(cut), self._asked.compute, "none", self._order)
        self._compute_ns[chunk_tokens].append(_first(run.compute_ns))

    def _one_layer_alone(self) -> None:
        run = self._pair.pipelined(Cut(1), [0], sends="first")
        self._part.append((run.sizes[0], _first(run.total_ns)))

    def _chunk_ns(self, cut: Cut) -> list[int]:
        """A layer's compute of each chunk: its share of the tokens."""
        lengths = chunk_lengths(self._tokens, cut.chunk_tokens)
        return [self._layer_ns * length // self._tokens for length in lengths]

    # --- what came of it

    def _record(self) -> dict[str, Any]:
        compute = {chunk_tokens: statistics.median(samples) for chunk_tokens, samples in self._compute_ns.items()}
        serial = next(series for series in self._series if series.cut == Cut(self._layers))
        link = self._link()
        cuts = [self._cut_record(series, compute[series.cut.chunk_tokens], link) for series in self._series]
        best, ties = best_and_ties(cuts)
        return {
            "compute": {
                "kind": self._asked.compute,
                "source": self._source,
                "layers": self._layers,
                "layer_ns": self._layer_ns,
                "alone_p50_ns": compute[None],
                "alone_samples_ns": self._compute_ns[None],
                "chunked": [
                    {"chunk_tokens": size, "alone_p50_ns": compute[size], "alone_samples_ns": samples}
                    for size, samples in self._compute_ns.items()
                    if size is not None
                ],
                **self._built,
            },
            "serial": {"total_p50_ns": statistics.median(serial.total_ns), "alone_p50_ns": _alone_p50(serial)},
            "rounds": len(serial.runs),
            "cuts": cuts,
            "best": {"cut": best, "ties": ties, "predicted_layers": self._predicted_layers(link)},
            "model": {
                "latency_ns": link.latency_ns,
                "occupancy_ns": link.occupancy_ns,
                "bandwidth_gbyte_s": link.gbyte_s,
                "one_layer_ns": [ns for _, ns in self._part],
            },
        }

    def _link(self) -> Link:
        """From the transfers without compute; those in chunks, whose pieces may be others, where no others differ."""
        whole = [series for series in self._series if series.cut.chunk_tokens is None]
        told = whole if _differ(whole) else self._series
        alone = [(series.sends, float(_alone_p50(series))) for series in told]
        part = self._part[0][0], statistics.median([ns for _, ns in self._part])
        return fit_link(self._pair.row.bytes, alone, part)

    def _predicted_layers(self, link: Link) -> int | None:
        """The best of all that there could be; None where cuts of as many sends do not tell what one costs."""
        if self._layers > 1 and not _differ(self._series):
            return None
        exposed = partial(self._predicted_ns, link, self._tokens)
        return best_layers(exposed, self._layers, range(1, self._layers + 1))

    def _cut_record(self, series: Series, compute: int, link: Link) -> dict[str, Any]:
        totals = series.total_ns
        total, transfer = statistics.median(totals), _alone_p50(series)
        ready, usable = series.medians("ready_ns"), series.medians("usable_ns")
        exposed = max(0, total - compute)
        interval = statistics.median_interval(totals)
        predicted = exposed_ns(self._as_computed(series.runs[0], series.cut), link, self._nominal_ns(series.cut))
        return {
            "cut": str(series.cut),
            "layers_per_send": series.cut.layers,
            "chunk_tokens": series.cut.chunk_tokens,
            "sends": len(ready),
            "total_p50_ns": total,
            "total_ci95_ns": None if interval is None else list(interval),
            "total_samples_ns": totals,
            "compute_p50_ns": statistics.median(series.compute_ns),
            "compute_samples_ns": series.compute_ns,
            "slowdown": statistics.median(series.compute_ns) / compute - 1 if compute else 0.0,
            "alone_p50_ns": transfer,
            "alone_samples_ns": series.alone_ns,
            "exposed_ns": exposed,
            "hidden_share": 1 - exposed / max(1, transfer),
            "predicted_exposed_ns": round(predicted),
            "critical": self._critical(series.runs[0].ready_after, ready, usable),
            "break_even_tokens": self._break_even(series, link),
        }

    def _as_computed(self, run: Pipelined, cut: Cut) -> list[Ready]:
        """The sends of a cut, computed as fast as was asked for."""
        by_unit = np.cumsum([ns for ns in self._chunk_ns(cut) for _ in range(self._layers)])
        return [Ready(float(by_unit[after - 1]), size) for after, size in zip(run.ready_after, run.sizes, strict=True)]

    def _nominal_ns(self, cut: Cut) -> int:
        return self._layers * sum(self._chunk_ns(cut))

    def _critical(self, ready_after: Sequence[int], ready: Sequence[int], usable: Sequence[int]) -> dict[str, Any]:
        """What the end waited for: compute up to a send, and from there on one transfer after another.

        That send is the last one that was computed after the one before it had become usable. The send that waited
        longest for those before it is named too.
        """
        waits = [max(0, before - own) for before, own in zip([0, *usable[:-1]], ready, strict=True)]
        start = max(number for number, wait in enumerate(waits) if wait == 0)
        longest = max(range(len(waits)), key=lambda number: waits[number])
        return {
            "computed_chunk": (ready_after[start] - 1) // self._layers,
            "computed_layer": (ready_after[start] - 1) % self._layers,
            "sends_after": len(waits) - 1 - start,
            "longest_wait_chunk": (ready_after[longest] - 1) // self._layers,
            "longest_wait_layer": (ready_after[longest] - 1) % self._layers,
            "longest_wait_ns": waits[longest],
            "ready_ns": list(ready),
            "usable_ns": list(usable),
        }

    def _break_even(self, series: Series, link: Link) -> int | None:
        """Of a cut by layers; chunks become more with the prompt."""
        if series.cut.chunk_tokens is not None or series.cut.layers == self._layers:
            return None
        exposed = partial(self._predicted_ns, link)
        return break_even_tokens(exposed, series.cut.layers, self._layers, self._pair.row.spec.block_size)

    def _predicted_ns(self, link: Link, tokens: int, together: int) -> float:
        """What is exposed of a prompt in one chunk, computed at this one's rate, in sends of `together` layers."""
        compute = self._layer_ns * self._layers * tokens / self._tokens
        after = send_ends([range(self._layers)], together)
        sends = computed_sends([(compute, self._pair.row.leaving(tokens, together))], after)
        return exposed_ns(sends, link, compute)


def _first(raw: bytes) -> int:
    return int(np.frombuffer(raw, np.int64)[0])


def _alone_p50(series: Series) -> int:
    return statistics.median(series.alone_ns)


def _differ(cuts: Sequence[Series]) -> bool:
    """Whether their numbers of sends do, which tells what a send costs."""
    return len({series.sends for series in cuts}) > 1


def best_and_ties(cuts: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """The cut with the least total, and those that cannot be told from it: their intervals of the median overlap.

    Of fewer samples than an interval takes, all that there are.
    """
    best = min(cuts, key=lambda cut: cut["total_p50_ns"])

    def ends(cut: dict[str, Any]) -> Sequence[int]:
        return cut["total_ci95_ns"] or (min(cut["total_samples_ns"]), max(cut["total_samples_ns"]))

    def tied(cut: dict[str, Any]) -> bool:
        return bool(ends(cut)[0] <= ends(best)[1])

    return best["cut"], [cut["cut"] for cut in cuts if cut is not best and tied(cut)]
