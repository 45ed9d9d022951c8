// The measuring loop: requests one after another (or `inflight` at once) over rotating transfer plans, timed natively.
//
// A request has a leg for each peer that carries a part of it (one, or one per pair of tensor-parallel ranks); the legs
// move at the same time and the last one counts. Both sides run the loop with the same numbers. Before a request is
// armed or posted, the prefill side stamps its epoch into every piece; after it is confirmed, the decode side checks
// the epochs and releases the request, and the prefill side takes them out again. None of this is in the timed part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/request.h"

namespace kvxfer {

struct LoopSettings {
  Side side = Side::prefill;
  Op op = Op::push;
  std::uint64_t first_epoch = 1;  // of the first request; the tag is the epoch, the request epoch modulo their number
  std::uint32_t count = 1;
  std::uint32_t inflight = 1;
  bool check = true;  // stamp and check epochs
  std::uint64_t seed = 0;
  Nanoseconds stall_ns = 0;  // Error(peer_lost) when nothing happens and nothing moves for so long
};

// Per request, in order of epochs. A side has only what its own clock saw: transfer and post the initiator, hand-over
// the prefill side; the others are empty.
struct LoopResult {
  std::vector<Nanoseconds> transfer_ns;  // first post to last confirmed
  std::vector<Nanoseconds> post_ns;      // how long posting all legs took
  std::vector<Nanoseconds> handover_ns;  // KV ready to decode says usable
  Nanoseconds wall_ns = 0;               // first post (or arm) to last confirmed (or delivered)
  std::uint64_t wrong_epochs = 0;        // pieces; decode side
  Nanoseconds checking_cpu_ns = 0;       // CPU time that stamping and checking took
};

// Throws Error(peer_lost) when a peer is lost or stalls. A peer may be a loop ahead of the slowest: what it says of the
// next one is put back for it.
LoopResult run_loop(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
                    const LoopSettings& settings);

}  // namespace kvxfer
