// The measuring loop of per-layer pipelining: requests whose segments leave as soon as they are computed, while later
// ones are computed.
//
// A request is cut into sends, each ready after so many units of compute and a transfer of its own. In a push the
// decode side arms them, and the prefill side posts each when it is ready. In a pull the prefill side arms each when it
// is ready, and the decode side, which hears of that on the backend's own connection, posts it. Epochs are stamped
// before the compute of a request begins, and checked after all of it is usable; neither is in the timed part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/compute.h"
#include "backend/request.h"

namespace kvxfer {

// Segments of each leg's plan that move together; a leg may have none.
struct Send {
  std::uint32_t ready_after = 0;  // units of compute
  std::vector<std::vector<std::uint32_t>> segments;
};

struct PipelineSettings {
  Side side = Side::prefill;
  Op op = Op::push;
  std::uint64_t first_epoch = 1;  // of the first request, which is the epoch modulo their number
  std::uint32_t count = 1;
  bool check = true;  // stamp and check epochs
  std::uint64_t seed = 0;
  Nanoseconds stall_ns = 0;  // Error(peer_lost) when nothing happens, is computed or moves for so long
};

// On the prefill side's clock, which alone has any: per request, from the start of its compute.
struct PipelineResult {
  std::vector<Nanoseconds> total_ns;    // to the end of compute, or to all of it usable, whichever is later
  std::vector<Nanoseconds> compute_ns;  // to the end of compute
  // Per request and send: to its last unit computed, and to decode's word that it is usable.
  std::vector<Nanoseconds> ready_ns;
  std::vector<Nanoseconds> usable_ns;
  std::uint64_t wrong_epochs = 0;  // pieces; decode side
};

// Sends in the order in which they are ready, the same on both sides; none: only compute. `compute` is the prefill
// side's, decode has nullptr. Throws Error(peer_lost) when a peer is lost or stalls.
PipelineResult run_pipeline(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
                            std::span<const Send> sends, Compute* compute, const PipelineSettings& settings);

}  // namespace kvxfer
