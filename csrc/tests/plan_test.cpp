#include <random>

#include "backend/lane_peer.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

// A plan of pieces of these lengths, 5 bytes apart.
struct Sample {
  PlanPieces pieces;
  std::shared_ptr<Plan> owner;
  const LanePlan& plan;

  Sample(Pair& pair, const std::vector<std::uint64_t>& lengths, const std::vector<std::uint32_t>& segments)
      : pieces(spread(lengths, segments)), owner(pair.prepare(pieces).first), plan(dynamic_cast<LanePlan&>(*owner)) {}

  static PlanPieces spread(const std::vector<std::uint64_t>& lengths, const std::vector<std::uint32_t>& segments) {
    PlanPieces made;
    std::uint64_t at = 0;
    for (const std::uint64_t length : lengths) {
      made.add(at, at, length);
      at += length + 5;
    }
    made.segments = segments;
    return made;
  }
};

std::string ranges(const LanePlan& plan, std::vector<std::uint32_t> segments) {
  std::vector<Range> found;
  plan.ranges(segments, found);
  std::string text;
  for (const Range& range : found) text += std::to_string(range.from) + "-" + std::to_string(range.to) + " ";
  return text;
}

TEST(plan, ranges_join_neighbours_and_leave_out_empty_segments) {
  Pair pair(4096);
  const Sample s(pair, {10, 20, 30, 0, 40}, {0, 1, 2, 3, 4});
  CHECK_EQ(s.plan.bytes(), 100U);
  CHECK_EQ(s.plan.segments(), 5U);
  CHECK_EQ(ranges(s.plan, {}), "0-100 ");
  CHECK_EQ(ranges(s.plan, {0, 1, 2, 3, 4}), "0-100 ");
  CHECK_EQ(ranges(s.plan, {4, 0}), "60-100 0-10 ");
  CHECK_EQ(ranges(s.plan, {2, 3, 4}), "30-100 ");
  CHECK_EQ(ranges(s.plan, {0, 3, 2}), "0-10 30-60 ");
  CHECK_EQ(ranges(s.plan, {3}), "0-0 ");
}

TEST(plan, unknown_and_repeated_segments_are_refused) {
  Pair pair(4096);
  const Sample s(pair, {10, 20, 50}, {0, 2});
  CHECK_THROWS(Fault::usage, "segment 2 of a plan with 2", ranges(s.plan, {0, 2}));
  CHECK_THROWS(Fault::usage, "named twice", ranges(s.plan, {1, 1}));
  CHECK_THROWS(Fault::usage, "3 segments of a plan with 2", ranges(s.plan, {0, 1, 0}));
}

TEST(plan, pieces_cover_every_byte_once_whatever_the_cut) {
  Pair pair(4096);
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint64_t> lengths(1 + random() % 20);
    for (auto& length : lengths) length = random() % 4 == 0 ? 0 : random() % 100;
    const Sample s(pair, lengths, {0});
    std::memset(pair.a.region.address, 0, pair.a.region.bytes);
    const std::uint64_t all = s.plan.bytes();
    std::vector<iovec> room(1 + random() % 4);
    std::uint64_t at = 0;
    while (at < all) {
      const std::uint64_t before = at;
      const std::size_t n = s.plan.pieces(at, std::min<std::uint64_t>(1 + random() % 150, all - at), room);
      CHECK(n > 0 && at > before);
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t b = 0; b < room[i].iov_len; ++b) ++static_cast<char*>(room[i].iov_base)[b];
    }
    for (std::size_t i = 0; i < lengths.size(); ++i)
      for (std::uint64_t b = 0; b < lengths[i]; ++b) CHECK(pair.a.at(s.pieces.local[i])[b] == std::byte{1});
    std::uint64_t touched = 0;
    for (std::uint64_t b = 0; b < pair.a.region.bytes; ++b) touched += static_cast<std::uint64_t>(*pair.a.at(b));
    CHECK_EQ(touched, all);
  }
}

TEST(plan, a_plan_is_checked_before_the_peer_hears_of_it) {
  Pair pair(4096);
  PlanPieces outside;
  outside.add(4000, 0, 97);
  CHECK_THROWS(Fault::usage, "descriptor 0 lies outside its local region", pair.a.prepare(outside));
  CHECK_THROWS(Fault::usage, "descriptor 0 lies outside its remote region", pair.a.prepare(outside.mirrored()));
  PlanPieces wraps;
  wraps.add(UINT64_MAX, 0, 2);
  CHECK_THROWS(Fault::usage, "outside its local region", pair.a.prepare(wraps));
  PlanPieces huge;
  huge.add(0, 0, UINT64_MAX);
  CHECK_THROWS(Fault::usage, "outside its local region", pair.a.prepare(huge));

  PlanPieces good;
  good.add(0, 0, 8);
  good.add(8, 8, 8);
  for (const std::vector<std::uint32_t>& starts :
       std::vector<std::vector<std::uint32_t>>{{1}, {0, 0}, {0, 2}, {0, 1, 1}, {0, 5}}) {
    PlanPieces bad = good;
    bad.segments = starts;
    CHECK_THROWS(Fault::usage, "segment starts", pair.a.prepare(bad));
  }
  PlanPieces nothing;
  nothing.segments = {0, 5};
  CHECK_THROWS(Fault::usage, "segment starts", pair.a.prepare(nothing));

  const std::vector<std::uint32_t> one{0}, other{7};
  const std::vector<std::uint64_t> zero{0}, eight{8}, two{0, 0};
  CHECK_THROWS(Fault::usage, "unregistered local region",
               pair.a.context->prepare(*pair.a.peer, {other, zero, one, zero, eight, one}, soon()));
  CHECK_THROWS(Fault::usage, "key was not imported",
               pair.a.context->prepare(*pair.a.peer, {one, zero, other, zero, eight, one}, soon()));
  CHECK_THROWS(Fault::usage, "differ in length",
               pair.a.context->prepare(*pair.a.peer, {one, two, one, zero, eight, one}, soon()));

  // None of this has disturbed the order in which the two sides prepare.
  const auto plans = pair.prepare(good);
  CHECK_EQ(plans.first->bytes(), 16U);
  CHECK_EQ(plans.second->descriptors(), 2U);
}

TEST(plan, sides_that_prepare_different_plans_are_told) {
  Pair pair(4096);
  PlanPieces mine;
  mine.add(0, 100, 50);
  PlanPieces theirs = mine.mirrored();
  theirs.lengths[0] = 49;
  std::string a, b;
  together(
      [&] { CHECK_THROWS(Fault::usage, "prepared different plans (number 0): descriptor 0", pair.a.prepare(mine)); },
      [&] { CHECK_THROWS(Fault::usage, "different plans", pair.b.prepare(theirs)); });
  PlanPieces longer = mine.mirrored();
  longer.add(0, 0, 1);
  together([&] { CHECK_THROWS(Fault::usage, "1 descriptors here, 2 there", pair.a.prepare(mine)); },
           [&] { CHECK_THROWS(Fault::usage, "2 descriptors here, 1 there", pair.b.prepare(longer)); });
  CHECK_EQ(pair.prepare(mine).first->bytes(), 50U);
}

TEST(plan, a_peer_that_does_not_prepare_costs_the_deadline) {
  Pair pair(4096);
  PlanPieces mine;
  mine.add(0, 0, 8);
  CHECK_THROWS(Fault::peer_lost, "did not prepare its side",
               pair.a.prepare_with(*pair.a.peer, mine, Deadline::after(50'000'000)));
}

TEST(plan, keys_are_checked) {
  Pair pair(4096);
  for (const std::string& wrong : {std::string(), std::string("KVXK1"), std::string(20, 'x')})
    CHECK_THROWS(Fault::usage, "keys are malformed", pair.a.peer->import_keys(wrong));
  CHECK_THROWS(Fault::usage, "ends beyond the address space",
               pair.a.context->register_memory(pair.a.region.address, UINT64_MAX, MemoryKind::host));
  CHECK_THROWS(Fault::usage, "needs an address", pair.a.context->register_memory(nullptr, 8, MemoryKind::host));
}

}  // namespace
}  // namespace kvxfer::test
