#include "tests/conformance/rig.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace kvxfer::test {

namespace {

constexpr Nanoseconds slice = 1'000'000;

bool is_end(EventKind kind) {
  return kind == EventKind::confirmed || kind == EventKind::delivered || kind == EventKind::cancelled ||
         kind == EventKind::error;
}

std::string tell(EventKind kind, std::uint64_t tag) {
  return std::string(name_of(kind)) + " of tag " + std::to_string(tag);
}

}  // namespace

std::vector<BackendCheck>& backend_checks() {
  static std::vector<BackendCheck> checks;
  return checks;
}

bool add_backend_check(BackendCheck check) {
  backend_checks().push_back(std::move(check));
  return true;
}

PlanPieces shuffled(std::size_t n, std::uint64_t length, std::size_t per_segment) {
  std::vector<std::uint64_t> from(n), to(n);
  std::iota(from.begin(), from.end(), std::uint64_t{0});
  std::iota(to.begin(), to.end(), std::uint64_t{0});
  std::mt19937 random(3);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  PlanPieces pieces;
  pieces.segments.clear();
  for (std::size_t i = 0; i < n; ++i) {
    if (i % per_segment == 0) pieces.segments.push_back(static_cast<std::uint32_t>(i));
    pieces.add(from[i] * length, to[i] * length, length);
  }
  return pieces;
}

PlanPieces one_piece(std::uint64_t bytes) {
  PlanPieces pieces;
  pieces.add(0, 0, bytes);
  return pieces;
}

Rig::Rig(const Subject& subject, const std::vector<std::uint64_t>& region_bytes)
    : Pair(subject.open, region_bytes), can_(subject.can) {
  fill(extents(a), pattern_seed);
  poison_target();
}

std::vector<Extent> Rig::extents(const End& side) {
  std::vector<Extent> all;
  for (const Region& region : side.regions) all.push_back({region.address, region.bytes});
  return all;
}

Event Rig::wait(End& side, EventKind kind, std::uint64_t tag) {
  const Deadline deadline = soon();
  for (;;) {
    if (const auto event = side.take(kind, tag)) return *event;
    for (const Event& event : side.seen)
      if (event.kind == EventKind::peer_lost ||
          (event.tag == tag && (event.kind == EventKind::cancelled || event.kind == EventKind::error)))
        throw Failure(tell(event.kind, event.tag) + " in place of " + tell(kind, tag) + ". " + side.peer->lost());
    if (deadline.passed()) throw Failure(tell(kind, tag) + " did not come");
    other(side).collect(Deadline(0));
    side.collect(Deadline::after(slice));
  }
}

Event Rig::wait_for_end(End& side, std::uint64_t tag) {
  const Deadline deadline = soon();
  for (;;) {
    for (const Event& event : side.seen)
      if (event.tag == tag && is_end(event.kind)) return *side.take(event.kind, tag);
    if (deadline.passed()) throw Failure("the end of tag " + std::to_string(tag) + " did not come");
    other(side).collect(Deadline(0));
    side.collect(Deadline::after(slice));
  }
}

void Rig::settle(Nanoseconds ns) {
  const Deadline deadline = Deadline::after(ns);
  do {
    a.collect(Deadline::after(slice));
    b.collect(Deadline::after(slice));
  } while (!deadline.passed());
}

void Rig::arm(const Plans& plans, Op op, std::uint64_t tag, const Segments& segments) {
  passive(op).context->arm(of_passive(plans, op), op, segments, tag);
}

void Rig::post(const Plans& plans, Op op, std::uint64_t tag, const Segments& segments, const ReadyFlag* ready) {
  if (can_.needs_arm) {
    arm(plans, op, tag, segments);
    wait(initiator(op), EventKind::armed, tag);
  }
  initiator(op).context->post(of_initiator(plans, op), op, segments, tag, ready);
}

void Rig::complete(Op op, std::uint64_t tag) {
  wait(initiator(op), EventKind::confirmed, tag);
  wait(passive(op), EventKind::delivered, tag);
}

// --- what lies where ---------------------------------------------------------------------------------------------

void Rig::poison_target() {
  for (const Region& region : b.regions) poison(region.address, region.bytes);
}

Pieces Rig::at_source(const PlanPieces& pieces) {
  return {pieces.local_regions, pieces.local, pieces.local_regions, pieces.local, pieces.lengths};
}

Pieces Rig::at_target(const PlanPieces& pieces) {
  return {pieces.remote_regions, pieces.remote, pieces.local_regions, pieces.local, pieces.lengths};
}

void Rig::require_moved(const PlanPieces& pieces, std::uint64_t epoch) const {
  require_source();
  if (!can_.moves_data) return require_poison_between({});
  const Pieces target = at_target(pieces);
  const Verification seen = verify(extents(b), target, pattern_seed, epoch, 1);
  if (seen.wrong_words != 0)
    throw Failure(std::to_string(seen.wrong_words) + " wrong words, the first in piece " + std::to_string(seen.piece) +
                  ", word " + std::to_string(seen.word));
  require_poison_between(pieces);
}

void Rig::require_moved_segments(const PlanPieces& pieces, const Segments& segments) const {
  PlanPieces some;
  for (const std::uint32_t segment : segments) {
    const std::size_t end = segment + 1 == pieces.segments.size() ? pieces.count() : pieces.segments[segment + 1];
    for (std::size_t i = pieces.segments[segment]; i < end; ++i)
      some.add(pieces.local[i], pieces.remote[i], pieces.lengths[i], pieces.local_regions[i], pieces.remote_regions[i]);
  }
  require_moved(some);
}

void Rig::require_source() const {
  PlanPieces whole;
  for (std::uint32_t r = 0; r < a.regions.size(); ++r) whole.add(0, 0, a.regions[r].bytes, r, r);
  const Verification seen = verify(extents(a), at_source(whole), pattern_seed, 0, 1);
  if (seen.wrong_words != 0) throw Failure(std::to_string(seen.wrong_words) + " words of the source have changed");
}

void Rig::require_poison_between(const PlanPieces& pieces) const {
  std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> used(b.regions.size());
  for (std::size_t i = 0; i < pieces.count(); ++i)
    used[pieces.remote_regions[i]].emplace_back(pieces.remote[i], pieces.remote[i] + pieces.lengths[i]);
  for (std::size_t r = 0; r < used.size(); ++r) {
    std::ranges::sort(used[r]);
    used[r].emplace_back(b.regions[r].bytes, b.regions[r].bytes);
    std::uint64_t at = 0;
    for (const auto& [from, to] : used[r]) {
      for (; at < from; ++at)
        if (b.regions[r].address[at] != poison_byte)
          throw Failure("byte " + std::to_string(at) + " of region " + std::to_string(r) +
                        " was written: no piece is there");
      at = std::max(at, to);
    }
  }
}

}  // namespace kvxfer::test
