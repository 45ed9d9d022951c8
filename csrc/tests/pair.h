// Two contexts of one backend in this process, joined over loopback, with one region each.
#pragma once

#include <cstring>
#include <memory>
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
inline Deadline soon() { return Deadline::after(20 * second); }

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

// A plan as one side sees it; the other side's is the same with local and remote exchanged. Everything in region 0.
struct PlanPieces {
  std::vector<std::uint64_t> local, remote, lengths;
  std::vector<std::uint32_t> segments{0};

  void add(std::uint64_t from, std::uint64_t to, std::uint64_t length) {
    local.push_back(from);
    remote.push_back(to);
    lengths.push_back(length);
  }
  PlanPieces mirrored() const { return {remote, local, lengths, segments}; }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t length : lengths) sum += length;
    return sum;
  }
};

struct End {
  std::unique_ptr<Context> context;
  std::shared_ptr<Peer> peer;
  Region region;
  std::vector<Event> seen;

  std::shared_ptr<Plan> prepare(const PlanPieces& pieces) { return prepare_with(*peer, pieces); }
  std::shared_ptr<Plan> prepare_with(Peer& with, const PlanPieces& pieces, Deadline deadline = soon()) {
    const std::vector<std::uint32_t> regions(pieces.lengths.size(), 0);
    return context->prepare(with, {regions, pieces.local, regions, pieces.remote, pieces.lengths, pieces.segments},
                            deadline);
  }
  // Waits for an event, and forgets it; the others that come before it are kept for the next call.
  Event wait(EventKind kind, std::uint64_t tag, Deadline deadline = soon()) {
    for (;;) {
      for (std::size_t i = 0; i < seen.size(); ++i)
        if (seen[i].kind == kind && seen[i].tag == tag) {
          const Event event = seen[i];
          seen.erase(seen.begin() + static_cast<std::ptrdiff_t>(i));
          return event;
        }
      Event events[16];
      const std::size_t n = context->poll(events, deadline);
      seen.insert(seen.end(), events, events + n);
      if (n == 0 && deadline.passed())
        throw Failure("event " + std::to_string(static_cast<int>(kind)) + " of tag " + std::to_string(tag) +
                      " did not come");
    }
  }
  // Everything that comes within `ns`.
  std::vector<Event> drain(Nanoseconds ns) {
    const Deadline deadline = Deadline::after(ns);
    Event events[16];
    while (const std::size_t n = context->poll(events, deadline)) seen.insert(seen.end(), events, events + n);
    return std::exchange(seen, {});
  }
  std::byte* at(std::uint64_t offset) const { return region.address + offset; }
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

struct Pair {
  End a, b;

  explicit Pair(std::uint64_t bytes = 1 << 20, const Options& options = {}, const std::string& backend = "tcp") {
    for (End* side : {&a, &b}) {
      side->context = find_backend(backend).open(token, options);
      side->region = side->context->allocate(bytes, MemoryKind::host, -1);
    }
    join(*a.context, a.peer, *b.context, b.peer);
    a.peer->import_keys(b.context->export_keys({&b.region, 1}));
    b.peer->import_keys(a.context->export_keys({&a.region, 1}));
    for (std::uint64_t i = 0; i < bytes; ++i) *a.at(i) = static_cast<std::byte>(i * 7 + (i >> 8) + 1);
    std::memset(b.region.address, 0xDB, bytes);
  }

  // The same plan on both sides, as `a` sees it.
  std::pair<std::shared_ptr<Plan>, std::shared_ptr<Plan>> prepare(const PlanPieces& pieces) {
    std::pair<std::shared_ptr<Plan>, std::shared_ptr<Plan>> plans;
    together([&] { plans.first = a.prepare(pieces); }, [&] { plans.second = b.prepare(pieces.mirrored()); });
    return plans;
  }
  // How many pieces of `a` lie at their place in `b`.
  std::size_t arrived(const PlanPieces& pieces) const {
    std::size_t n = 0;
    for (std::size_t i = 0; i < pieces.lengths.size(); ++i)
      if (std::memcmp(a.at(pieces.local[i]), b.at(pieces.remote[i]), pieces.lengths[i]) == 0) ++n;
    return n;
  }
};

}  // namespace kvxfer::test
