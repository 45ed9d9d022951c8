// A pair of contexts that a check moves data with: from `a` to `b`, in a push posted by `a` and in a pull posted by
// `b`.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memory/pattern.h"
#include "tests/conformance/suite.h"

namespace kvxfer::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
// ThreadSanitizer knows nothing of the order that a confirmation over a socket gives to the bytes before it.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool order_is_seen_across_sides = false;
#else
inline constexpr bool order_is_seen_across_sides = true;
#endif

inline constexpr std::uint64_t pattern_seed = 5;

using Segments = std::vector<std::uint32_t>;

// Pieces of `length` bytes at shuffled places of both sides' first region, a segment for every `per_segment` of them.
PlanPieces shuffled(std::size_t n, std::uint64_t length, std::size_t per_segment);
PlanPieces one_piece(std::uint64_t bytes);

class Rig : public Pair {
 public:
  // Regions of those sizes on both sides; those of `a` hold the pattern of memory/pattern.h, those of `b` poison.
  explicit Rig(const Subject& subject, const std::vector<std::uint64_t>& region_bytes = {1 << 20});

  End& initiator(Op op) { return op == Op::push ? a : b; }
  End& passive(Op op) { return op == Op::push ? b : a; }
  static Plan& of_initiator(const Plans& plans, Op op) { return op == Op::push ? *plans.first : *plans.second; }
  static Plan& of_passive(const Plans& plans, Op op) { return op == Op::push ? *plans.second : *plans.first; }

  // Each of these polls both sides: an engine may need it. Throws Failure when the transfer or the peer ends otherwise.
  Event wait(End& side, EventKind kind, std::uint64_t tag);
  // Waits until the transfer has ended on that side, in whatever way.
  Event wait_for_end(End& side, std::uint64_t tag);
  // Takes what comes within `ns` on both sides.
  void settle(Nanoseconds ns);

  void arm(const Plans& plans, Op op, std::uint64_t tag, const Segments& segments = {});
  // Arms first where the backend needs that.
  void post(const Plans& plans, Op op, std::uint64_t tag, const Segments& segments = {},
            const ReadyFlag* ready = nullptr);
  // Waits for confirmed and delivered.
  void complete(Op op, std::uint64_t tag);
  void move(const Plans& plans, Op op, std::uint64_t tag, const Segments& segments = {}) {
    post(plans, op, tag, segments);
    complete(op, tag);
  }

  void poison_target();
  // These pieces of the plan and no other byte of `b` are as they were on `a`, which has not changed.
  void require_moved(const PlanPieces& pieces, std::uint64_t epoch = 0) const;
  void require_moved_segments(const PlanPieces& pieces, const Segments& segments) const;
  void require_untouched() const { require_moved({}); }
  // The pieces as fill(), stamp() and verify() take them, of either side.
  static Pieces at_source(const PlanPieces& pieces);
  static Pieces at_target(const PlanPieces& pieces);
  static std::vector<Extent> extents(const End& side);

 private:
  End& other(const End& side) { return &side == &a ? b : a; }
  void require_source() const;
  void require_poison_between(const PlanPieces& pieces) const;

  const Capabilities can_;
};

}  // namespace kvxfer::test
