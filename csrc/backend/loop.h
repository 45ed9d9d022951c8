// The measuring loop: requests one after another (or `inflight` at once) over rotating transfer plans, timed natively.
//
// Both sides run it with the same numbers. Before a request is armed or posted, the prefill side stamps its epoch into
// every block; after it is confirmed, the decode side checks the epochs and releases the request. Neither is in the
// timed part.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "memory/pattern.h"

namespace kvxfer {

enum class Side : std::uint8_t { prefill, decode };

// One request of the rotation: its plan, and its block tables on both sides.
struct LoopRequest {
  std::shared_ptr<Plan> plan;
  std::vector<std::uint32_t> prefill_table;
  std::vector<std::uint32_t> decode_table;
};

struct LoopSettings {
  Side side = Side::prefill;
  Op op = Op::push;
  std::uint64_t first_epoch = 1;  // of the first request; the tag is the epoch, the plan epoch modulo their number
  std::uint32_t count = 1;
  std::uint32_t inflight = 1;
  bool check = true;  // stamp and check epochs
  std::uint64_t seed = 0;
  Nanoseconds stall_ns = 0;  // Error(peer_lost) when nothing happens and nothing moves for so long
};

// Per request, in order of epochs. A side has only what its own clock saw: transfer and post the initiator, hand-over
// the prefill side; the others are empty.
struct LoopResult {
  std::vector<Nanoseconds> transfer_ns;  // post to confirmed
  std::vector<Nanoseconds> post_ns;      // how long post took to return
  std::vector<Nanoseconds> handover_ns;  // KV ready to decode says usable
  Nanoseconds wall_ns = 0;               // first post (or arm) to last confirmed (or delivered)
  std::uint64_t wrong_epochs = 0;        // blocks; decode side
};

// Throws Error(peer_lost) when the peer is lost or stalls.
LoopResult run_loop(Context& context, Peer& peer, std::span<const LoopRequest> requests, const PoolView& pool,
                    const LoopSettings& settings);

}  // namespace kvxfer
