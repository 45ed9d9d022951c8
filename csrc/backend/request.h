// What the measuring loops move: requests of legs, the epochs in their pieces, and the peers that carry them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "memory/pattern.h"

namespace kvxfer {

enum class Side : std::uint8_t { prefill, decode };

// What one peer carries of a request. The pieces are the plan's, or none when nothing is to be checked.
struct Leg {
  std::shared_ptr<Peer> peer;
  std::shared_ptr<Plan> plan;
  Pieces pieces;
};

// One request of the rotation; no peer has two legs, and every request has legs of the same peers.
struct LoopRequest {
  std::vector<Leg> legs;
};

// Throws Error(usage) unless there are requests, and each has legs as said above.
void require_legs(std::span<const LoopRequest> requests);
// Throws Error(peer_lost) that says why when a peer of the request is lost.
void require_peers(const LoopRequest& request);
// The end of a loop one of whose transfers has ended otherwise: throws Error(peer_lost) with the reason if there is
// one.
[[noreturn]] void give_up(const LoopRequest& request);
// Which leg the peer of that id has; their number when it has none.
std::size_t leg_of(const LoopRequest& request, std::uint32_t peer);

// Stamps and checks the epochs of requests, and counts the CPU time that takes.
class Epochs {
 public:
  // `check`: false to do neither.
  Epochs(std::span<const Extent> regions, std::uint64_t seed, bool check)
      : regions_(regions), seed_(seed), check_(check) {}

  void stamp_all(const LoopRequest& request, std::uint64_t epoch);
  // Pieces that carry another epoch.
  std::uint64_t wrong(const LoopRequest& request, std::uint64_t epoch);
  Nanoseconds cpu_ns() const { return cpu_ns_; }

 private:
  const std::span<const Extent> regions_;
  const std::uint64_t seed_;
  const bool check_;
  Nanoseconds cpu_ns_ = 0;
};

// CPU time of the calling thread.
Nanoseconds thread_cpu_ns();

// What a peer that is ahead says of requests that are not running yet.
class EarlyEvents {
 public:
  // Throws Error(peer_lost) when there are too many.
  void keep(const Event& event);
  // To whoever polls next.
  void put_back(Context& context);

 private:
  std::vector<Event> events_;
};

}  // namespace kvxfer
