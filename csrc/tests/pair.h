// Two contexts of one backend in this process, joined over loopback, with one region each or several.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/registry.h"
#include "tests/check.h"

namespace kvxfer::test {

inline const std::string token(32, 'k');
inline constexpr Nanoseconds second = 1'000'000'000;
// How long a test waits for what must come. Only a test of what never comes makes it shorter.
inline Nanoseconds patience = 20 * second;
inline Deadline soon() { return Deadline::after(patience); }

// Runs both at once; what either throws is thrown here.
template <typename A, typename B>
void together(const A& a, const B& b) {
  std::exception_ptr failed;
  {
    const std::jthread other([&] {
      try {
        b();
      } catch (...) {
        failed = std::current_exception();
      }
    });
    a();
  }
  if (failed) std::rethrow_exception(failed);
}

// A plan as one side sees it; the other side's is the same with local and remote exchanged.
struct PlanPieces {
  std::vector<std::uint64_t> local, remote, lengths;
  std::vector<std::uint32_t> segments{0};
  std::vector<std::uint32_t> local_regions, remote_regions;

  void add(std::uint64_t from, std::uint64_t to, std::uint64_t length, std::uint32_t from_region = 0,
           std::uint32_t to_region = 0) {
    local.push_back(from);
    remote.push_back(to);
    lengths.push_back(length);
    local_regions.push_back(from_region);
    remote_regions.push_back(to_region);
  }
  std::size_t count() const { return lengths.size(); }
  PlanPieces mirrored() const { return {remote, local, lengths, segments, remote_regions, local_regions}; }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t length : lengths) sum += length;
    return sum;
  }
  PlanArrays arrays() const { return {local_regions, local, remote_regions, remote, lengths, segments}; }
};

inline const char* name_of(EventKind kind) {
  constexpr const char* names[] = {"armed",    "local",     "confirmed", "delivered",
                                   "released", "cancelled", "error",     "peer_lost"};
  const auto at = static_cast<std::size_t>(kind);
  return at < std::size(names) ? names[at] : "unknown";
}

struct End {
  std::unique_ptr<Context> context;
  std::shared_ptr<Peer> peer;
  Region region;  // the first
  std::vector<Region> regions;
  std::vector<Event> seen;

  void allocate(std::uint64_t bytes) {
    regions.push_back(context->allocate(bytes, MemoryKind::host, -1));
    region = regions.front();
  }
  std::shared_ptr<Plan> prepare(const PlanPieces& pieces) { return prepare_with(*peer, pieces); }
  std::shared_ptr<Plan> prepare_with(Peer& with, const PlanPieces& pieces, Deadline deadline = soon()) const {
    return context->prepare(with, pieces.arrays(), deadline);
  }
  void collect(Deadline deadline) {
    Event events[16];
    const std::size_t n = context->poll(events, deadline);
    seen.insert(seen.end(), events, events + n);
  }
  // Takes the first event of that kind and tag out of what was collected.
  std::optional<Event> take(EventKind kind, std::uint64_t tag) {
    for (std::size_t i = 0; i < seen.size(); ++i)
      if (seen[i].kind == kind && seen[i].tag == tag) {
        const Event event = seen[i];
        seen.erase(seen.begin() + static_cast<std::ptrdiff_t>(i));
        return event;
      }
    return std::nullopt;
  }
  // Waits for an event, and forgets it; the others that come before it are kept for the next call.
  Event wait(EventKind kind, std::uint64_t tag, Deadline deadline = soon()) {
    for (;;) {
      if (const auto event = take(kind, tag)) return *event;
      const std::size_t before = seen.size();
      collect(deadline);
      if (seen.size() == before && deadline.passed())
        throw Failure(std::string(name_of(kind)) + " of tag " + std::to_string(tag) + " did not come");
    }
  }
  // Everything that comes within `ns`.
  std::vector<Event> drain(Nanoseconds ns) {
    const Deadline deadline = Deadline::after(ns);
    Event events[16];
    while (const std::size_t n = context->poll(events, deadline)) seen.insert(seen.end(), events, events + n);
    return std::exchange(seen, {});
  }
  std::byte* at(std::uint64_t offset, std::uint32_t of = 0) const { return regions[of].address + offset; }
};

inline std::size_t count(const std::vector<Event>& events, EventKind kind, std::uint64_t tag) {
  std::size_t n = 0;
  for (const Event& event : events) n += event.kind == kind && event.tag == tag ? 1 : 0;
  return n;
}

// `a` connects, `b` listens.
inline void join(Context& a, std::shared_ptr<Peer>& a_peer, Context& b, std::shared_ptr<Peer>& b_peer) {
  const std::string endpoint = b.listen("127.0.0.1", 0);
  together([&] { a_peer = a.connect(endpoint, soon()); }, [&] { b_peer = b.accept(soon()); });
}

using Plans = std::pair<std::shared_ptr<Plan>, std::shared_ptr<Plan>>;
using Opener = std::function<std::unique_ptr<Context>()>;

struct Pair {
  End a, b;

  explicit Pair(std::uint64_t bytes = 1 << 20, const Options& options = {}, const std::string& backend = "tcp")
      : Pair([&] { return find_backend(backend).open(token, options); }, {bytes}) {
    for (std::uint64_t i = 0; i < bytes; ++i) *a.at(i) = static_cast<std::byte>(i * 7 + (i >> 8) + 1);
    std::memset(b.region.address, 0xDB, bytes);
  }
  // Regions of those sizes on both sides.
  Pair(const Opener& open, const std::vector<std::uint64_t>& region_bytes) {
    for (End* side : {&a, &b}) {
      side->context = open();
      for (const std::uint64_t bytes : region_bytes) side->allocate(bytes);
    }
    join(*a.context, a.peer, *b.context, b.peer);
    exchange_keys();
  }

  void exchange_keys() {
    a.peer->import_keys(b.context->export_keys(b.regions));
    b.peer->import_keys(a.context->export_keys(a.regions));
  }
  // The same plan on both sides, as `a` sees it.
  Plans prepare(const PlanPieces& pieces) {
    Plans plans;
    together([&] { plans.first = a.prepare(pieces); }, [&] { plans.second = b.prepare(pieces.mirrored()); });
    return plans;
  }
  // How many pieces of `a` lie at their place in `b`.
  std::size_t arrived(const PlanPieces& pieces) const {
    std::size_t n = 0;
    for (std::size_t i = 0; i < pieces.count(); ++i)
      if (std::memcmp(a.at(pieces.local[i], pieces.local_regions[i]), b.at(pieces.remote[i], pieces.remote_regions[i]),
                      pieces.lengths[i]) == 0)
        ++n;
    return n;
  }
};

}  // namespace kvxfer::test
