// Bytes arrive where they belong, and nowhere else, however they are cut.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

void move_both_ways(const Subject& subject, Rig& rig, const PlanPieces& pieces) {
  const Plans plans = rig.prepare(pieces);
  CHECK_EQ(plans.first->bytes(), pieces.bytes());
  CHECK_EQ(plans.second->bytes(), pieces.bytes());
  CHECK_EQ(plans.first->descriptors(), pieces.count());
  CHECK_EQ(plans.first->segments(), pieces.segments.size());
  for (const Op op : subject.ops()) {
    rig.poison_target();
    rig.move(plans, op, 40);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(moving, one_piece, all) {
  Rig rig(subject);
  move_both_ways(subject, rig, one_piece(1 << 20));
}

CHECK_BACKEND(moving, one_byte, all) {
  Rig rig(subject);
  PlanPieces pieces;
  pieces.add(4097, 63, 1);
  move_both_ways(subject, rig, pieces);
}

// The blocks of a request in several regions, as fragmentation f cuts them: 1 + round(f * (blocks - 1)) runs, each at a
// place of its own in both pools; a segment for each region.
PlanPieces fragmented(double fragmentation, std::size_t blocks, std::uint64_t block_bytes, std::uint32_t regions) {
  const auto runs = 1 + static_cast<std::size_t>(std::lround(fragmentation * static_cast<double>(blocks - 1)));
  std::vector<std::size_t> from(runs), to(runs);
  std::iota(from.begin(), from.end(), std::size_t{0});
  std::iota(to.begin(), to.end(), std::size_t{0});
  std::mt19937 random(9);
  std::ranges::shuffle(from, random);
  std::ranges::shuffle(to, random);
  const std::size_t most = (blocks + runs - 1) / runs;
  PlanPieces pieces;
  pieces.segments.clear();
  for (std::uint32_t region = 0; region < regions; ++region) {
    pieces.segments.push_back(static_cast<std::uint32_t>(pieces.count()));
    for (std::size_t run = 0; run < runs; ++run) {
      const std::size_t length = blocks / runs + (run < blocks % runs ? 1 : 0);
      const std::uint64_t place = (most + 1) * block_bytes;  // a block between two runs stays free
      pieces.add(from[run] * place, to[run] * place, length * block_bytes, region, regions - 1 - region);
    }
  }
  return pieces;
}

CHECK_BACKEND(moving, fragmentation_over_several_regions, all) {
  Rig rig(subject, {1 << 20, 1 << 20, 1 << 20});
  for (const double fragmentation : {0.0, 0.5, 1.0})
    move_both_ways(subject, rig, fragmented(fragmentation, 100, 2048, 3));
}

CHECK_BACKEND(moving, hundred_thousand_pieces, all) {
  constexpr std::size_t pieces = 100'000;
  Rig rig(subject, {pieces * 24});
  move_both_ways(subject, rig, shuffled(pieces, 24, pieces));
}

CHECK_BACKEND(moving, odd_lengths_and_alignments, all) {
  const std::uint64_t lengths[] = {1, 2, 3, 5, 7, 8, 13, 61, 64, 127, 509, 1021, 4093, 4096, 4099, 16381};
  constexpr std::uint64_t room = std::uint64_t{1} << 15;  // for each piece
  PlanPieces pieces;
  for (std::uint64_t i = 0; i < 63; ++i) {
    const std::uint64_t length = lengths[i % std::size(lengths)];
    pieces.add(i * room + 1 + i, (62 - i) * room + 63 - i, length);
  }
  // These end where their region does, which is no round number.
  const std::uint64_t bytes = 63 * room + 131;
  pieces.add(bytes - 67, bytes - 67, 67);
  pieces.add(bytes - 1, 0, 1, 1, 1);
  pieces.add(0, bytes - 1, 1, 1, 1);
  Rig rig(subject, {bytes, bytes});
  move_both_ways(subject, rig, pieces);
}

CHECK_BACKEND(moving, nothing_at_all, all) {
  Rig rig(subject, {4096});
  PlanPieces empty;
  empty.add(0, 0, 0);
  empty.add(4096, 4096, 0);  // just behind the region's last byte
  for (const PlanPieces& pieces : {PlanPieces{}, empty}) {
    const Plans plans = rig.prepare(pieces);
    CHECK_EQ(plans.first->bytes(), 0U);
    for (const Op op : subject.ops()) rig.move(plans, op, 3);
  }
  rig.require_untouched();
}

CHECK_BACKEND(moving, empty_pieces_among_others, all) {
  Rig rig(subject, {1 << 16});
  PlanPieces pieces;
  pieces.segments = {0, 1, 2, 3};
  pieces.add(0, 0, 20'000);
  pieces.add(20'000, 20'000, 0);
  pieces.add(20'000, 30'000, 100);
  pieces.add(20'000, 40'000, 0);
  const Plans plans = rig.prepare(pieces);
  for (std::uint32_t round = 0; round < 2 * subject.can.max_inflight; ++round)  // more than there are to leak
    for (const Op op : subject.ops()) rig.move(plans, op, 1, {0, 3, 2, 1});
  rig.require_moved(pieces);
}

CHECK_BACKEND(moving, is_counted_by_the_initiator, all) {
  Rig rig(subject);
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    const Context& initiator = *rig.initiator(op).context;
    const std::uint64_t before = initiator.bytes_moved();
    rig.move(plans, op, 1);
    const std::uint64_t wanted = before + (subject.can.moves_data ? pieces.bytes() : 0);
    // What a system call has taken is counted once it is back; the confirmation may be quicker.
    for (const Deadline deadline = soon(); initiator.bytes_moved() < wanted && !deadline.passed();)
      std::this_thread::yield();
    CHECK_EQ(initiator.bytes_moved(), wanted);
  }
}

CHECK_BACKEND(moving, through_what_describe_names, all) {
  Rig rig(subject, {4096});
  for (const End* side : {&rig.a, &rig.b}) {
    CHECK(!side->peer->describe().empty());
    for (const std::string& transport : side->peer->describe()) CHECK(!transport.empty());
    CHECK_EQ(side->peer->lost(), "");
  }
}

// The largest that fits: tests/conformance/test_largest_pool.py.
CHECK_BACKEND(moving, ends_and_middle_of_a_large_pool, all) {
  constexpr std::uint64_t bytes = (std::uint64_t{sanitized ? 16 : 64} << 20) + 13;
  Rig rig(subject, {bytes});
  PlanPieces pieces;  // the first and the last bytes of the pools, and what lies in their middle
  pieces.add(0, bytes - 4099, 4099);
  pieces.add(bytes - 4099, 0, 4099);
  pieces.add(bytes / 2 - 5, bytes / 2 + 3, 1 << 20);
  move_both_ways(subject, rig, pieces);
}

}  // namespace
}  // namespace kvxfer::test
