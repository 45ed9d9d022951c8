// Regions: of the engine's own memory and of others', made at any time.
#include <algorithm>
#include <memory>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 1 << 16;

CHECK_BACKEND(memory, is_numbered_and_writable_to_its_last_byte, all) {
  const auto context = subject.open();
  std::uint32_t id = 0;
  for (const std::uint64_t size :
       {std::uint64_t{1}, std::uint64_t{4095}, std::uint64_t{4097}, std::uint64_t{3} << 20}) {
    const Region region = context->allocate(size, MemoryKind::host, -1);
    CHECK_EQ(region.id, id++);
    CHECK_EQ(region.bytes, size);
    CHECK(region.kind == MemoryKind::host);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(region.address) % 64, 0U);  // a cache line
    region.address[0] = region.address[size - 1] = std::byte{1};
  }
}

CHECK_BACKEND(memory, that_cannot_be_had, all) {
  const auto context = subject.open();
  CHECK_THROWS(Fault::usage, "0 bytes", context->allocate(0, MemoryKind::host, -1));
  for (const std::uint64_t size : {std::uint64_t{1} << 50, UINT64_MAX / 2, UINT64_MAX - 8192, UINT64_MAX})
    CHECK_THROWS(Fault::unavailable, "memory", context->allocate(size, MemoryKind::host, -1));
  Rig rig(subject, {bytes});
  CHECK_THROWS(Fault::unavailable, "memory", rig.a.context->allocate(UINT64_MAX / 2, MemoryKind::host, -1));
  const Plans plans = rig.prepare(one_piece(bytes));
  for (const Op op : subject.ops()) rig.move(plans, op, 1);
  rig.require_moved(one_piece(bytes));
}

// With one error, and nothing is changed by it.
CHECK_BACKEND(memory, of_a_kind_that_it_does_not_move_is_refused, all) {
  const auto context = subject.open();
  const Region own = context->allocate(bytes, MemoryKind::host, -1);
  const auto& moved = subject.can.memory;
  for (const MemoryKind kind : {MemoryKind::cuda, static_cast<MemoryKind>(250)}) {
    if (std::ranges::find(moved, kind) != moved.end()) continue;
    CHECK_THROWS(Fault::unavailable, "memory", context->allocate(64, kind, -1));
    CHECK_THROWS(Fault::unavailable, "memory", context->register_memory(own.address, bytes, kind));
    CHECK_THROWS(Fault::unavailable, "memory", context->register_memory(nullptr, 0, kind));
  }
  CHECK(std::ranges::find(moved, MemoryKind::host) != moved.end());
  CHECK_EQ(context->allocate(64, MemoryKind::host, -1).id, 1U);
}

CHECK_BACKEND(memory, of_others_moves_or_is_refused, all) {
  const auto foreign = std::make_unique<std::byte[]>(2 * (bytes + 1));  // outlives the contexts that move it
  Rig rig(subject, {bytes});
  std::byte* const mine = foreign.get() + 1;  // no more aligned than the caller's memory happens to be
  std::byte* const theirs = mine + bytes;
  if (subject.can.own_memory) {
    CHECK_THROWS(Fault::usage, "memory", rig.a.context->register_memory(mine, bytes, MemoryKind::host));
  } else {
    rig.a.regions.push_back(rig.a.context->register_memory(mine, bytes, MemoryKind::host));
    rig.b.regions.push_back(rig.b.context->register_memory(theirs, bytes, MemoryKind::host));
    CHECK_EQ(rig.a.regions.back().id, 1U);
    CHECK(rig.a.regions.back().address == mine);
    rig.exchange_keys();
    fill(Rig::extents(rig.a), pattern_seed);
    PlanPieces pieces;
    pieces.add(3, 77, 60'001, 1, 1);  // foreign to foreign, and each with the engine's own
    pieces.add(0, 62'000, 500, 0, 1);
    pieces.add(62'000, 9, 500, 1, 0);
    const Plans plans = rig.prepare(pieces);
    for (const Op op : subject.ops()) {
      rig.poison_target();
      rig.move(plans, op, 1);
      rig.require_moved(pieces);
    }
  }
  CHECK_THROWS(Fault::usage, "", rig.a.context->register_memory(nullptr, bytes, MemoryKind::host));
  CHECK_THROWS(Fault::usage, "", rig.a.context->register_memory(mine, 0, MemoryKind::host));
  CHECK_THROWS(Fault::usage, "", rig.a.context->register_memory(mine, UINT64_MAX, MemoryKind::host));
}

// As a pool is: one allocation, and a region for each layer in it.
CHECK_BACKEND(memory, parts_of_an_allocation_are_regions, all) {
  constexpr std::uint64_t parts = 5;
  constexpr std::uint64_t part = 12'288;
  Rig rig(subject, {parts * part});
  std::vector<Extent> source(1), target(1);  // region 0, the whole pool, is left alone
  for (std::uint64_t p = 0; p < parts; ++p) {
    for (End* side : {&rig.a, &rig.b})
      side->regions.push_back(side->context->register_memory(side->at(p * part), part, MemoryKind::host));
    source.push_back({rig.a.at(p * part), part});
    target.push_back({rig.b.at(p * part), part});
  }
  rig.exchange_keys();
  fill(source, pattern_seed);
  PlanPieces pieces;
  for (std::uint32_t p = 0; p < parts; ++p) {
    pieces.add(0, 4096, 8192, p + 1, parts - p);
    pieces.add(8192, 0, 4096, p + 1, parts - p);
  }
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    poison(rig.b.region.address, rig.b.region.bytes);
    rig.move(plans, op, 1);
    if (subject.can.moves_data) CHECK_EQ(verify(target, Rig::at_target(pieces), pattern_seed, 0, 1).wrong_words, 0U);
  }
}

// The same bytes under two numbers, and all pairs of them.
CHECK_BACKEND(memory, registered_again_is_one_more_region, all) {
  Rig rig(subject, {bytes});
  for (End* side : {&rig.a, &rig.b})
    side->regions.push_back(side->context->register_memory(side->at(0), bytes, MemoryKind::host));
  CHECK_EQ(rig.a.regions.back().id, 1U);
  rig.exchange_keys();
  const std::vector<Extent> target(2, {rig.b.at(0), bytes});
  for (const std::uint32_t from : {0U, 1U}) {
    if (from > 0 && !order_is_seen_across_sides) return;  // what has been sent is filled anew
    std::vector<Extent> source(from);
    source.push_back({rig.a.at(0), bytes});
    fill(source, pattern_seed);
    PlanPieces pieces;
    pieces.add(0, 4096, 8192, from, 0);
    pieces.add(8192, 0, 4096, from, 1);
    const Plans plans = rig.prepare(pieces);
    for (const Op op : subject.ops()) {
      poison(rig.b.at(0), bytes);
      rig.move(plans, op, 1);
      if (subject.can.moves_data) CHECK_EQ(verify(target, Rig::at_target(pieces), pattern_seed, 0, 1).wrong_words, 0U);
    }
  }
}

CHECK_BACKEND(memory, more_of_it_after_transfers_and_old_plans_go_on, all) {
  Rig rig(subject, {bytes});
  const PlanPieces old_pieces = shuffled(16, 4096, 4);
  const Plans old_plans = rig.prepare(old_pieces);
  for (const Op op : subject.ops()) rig.move(old_plans, op, 1);
  for (std::uint32_t more = 1; more <= 3; ++more) {
    for (End* side : {&rig.a, &rig.b}) side->allocate(bytes);
    rig.exchange_keys();
    std::vector<Extent> fresh(more);  // the old ones are left alone: they have moved
    fresh.push_back({rig.a.regions.back().address, bytes});
    fill(fresh, pattern_seed);
    PlanPieces pieces;
    pieces.add(0, 4096, 8192, more, more - 1);
    pieces.add(8192, 0, 4096, more - 1, more);
    const Plans plans = rig.prepare(pieces);
    for (const Op op : subject.ops()) {
      rig.poison_target();
      rig.move(plans, op, 1);
      rig.require_moved(pieces);
      rig.poison_target();
      rig.move(old_plans, op, 2);
      rig.require_moved(old_pieces);
    }
  }
}

}  // namespace
}  // namespace kvxfer::test
