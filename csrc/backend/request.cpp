#include "backend/request.h"

#include <time.h>

#include <algorithm>

namespace kvxfer {

namespace {

constexpr std::size_t max_early = 4096;

std::vector<std::uint32_t> peers_of(const LoopRequest& request) {
  std::vector<std::uint32_t> peers;
  for (const Leg& leg : request.legs) peers.push_back(leg.peer->id());
  std::ranges::sort(peers);
  return peers;
}

}  // namespace

void require_legs(std::span<const LoopRequest> requests) {
  if (requests.empty()) throw Error(Fault::usage, "a loop needs requests, a count, room in flight and a stall time");
  const auto peers = peers_of(requests[0]);
  if (peers.empty()) throw Error(Fault::usage, "a request needs a leg");
  for (const LoopRequest& request : requests)
    if (peers_of(request) != peers) throw Error(Fault::usage, "every request of a loop needs legs of the same peers");
  if (std::ranges::adjacent_find(peers) != peers.end()) throw Error(Fault::usage, "a request has two legs of one peer");
  for (const LoopRequest& request : requests)
    for (const Leg& leg : request.legs)
      if (leg.plan->peer_id() != leg.peer->id())
        throw Error(Fault::usage, "a leg has a plan that was prepared with another peer");
}

void require_peers(const LoopRequest& request) {
  for (const Leg& leg : request.legs)
    if (const std::string why = leg.peer->lost(); !why.empty())
      throw Error(Fault::peer_lost, "the peer was lost: " + why);
}

void give_up(const LoopRequest& request) {
  require_peers(request);
  throw Error(Fault::peer_lost, "a transfer ended before it was delivered");
}

std::size_t leg_of(const LoopRequest& request, std::uint32_t peer) {
  std::size_t leg = 0;
  while (leg < request.legs.size() && request.legs[leg].peer->id() != peer) ++leg;
  return leg;
}

Nanoseconds thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void Epochs::stamp_all(const LoopRequest& request, std::uint64_t epoch) {
  if (!check_) return;
  const Nanoseconds began = thread_cpu_ns();
  for (const Leg& leg : request.legs) stamp(regions_, leg.pieces, seed_, epoch);
  cpu_ns_ += thread_cpu_ns() - began;
}

std::uint64_t Epochs::wrong(const LoopRequest& request, std::uint64_t epoch) {
  if (!check_) return 0;
  const Nanoseconds began = thread_cpu_ns();
  std::uint64_t found = 0;
  for (const Leg& leg : request.legs) found += wrong_epochs(regions_, leg.pieces, seed_, epoch);
  cpu_ns_ += thread_cpu_ns() - began;
  return found;
}

void EarlyEvents::keep(const Event& event) {
  if (events_.size() == max_early) throw Error(Fault::peer_lost, "the peers arm requests that are not running");
  events_.push_back(event);
}

void EarlyEvents::put_back(Context& context) {
  context.put_back(events_);
  events_.clear();
}

}  // namespace kvxfer
