#include "backend/loop.h"

#include <numeric>

#include "tests/allocations.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t block_bytes = 2048;
constexpr std::uint32_t blocks = 64;
constexpr std::uint64_t seed = 11;

// A pair with pools of one region, and a rotation of requests of 4 blocks each that share none. `a` is the prefill
// side.
struct Rotation {
  Pair pair;
  PoolView prefill{{{pair.a.region.address, block_bytes}}, blocks};
  PoolView decode{{{pair.b.region.address, block_bytes}}, blocks};
  std::vector<LoopRequest> prefill_requests, decode_requests;

  explicit Rotation(std::uint32_t slots, const std::string& backend = "tcp") : pair(block_bytes * blocks, {}, backend) {
    fill(prefill, seed);
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      std::vector<std::uint32_t> from(4), to(4);
      for (std::uint32_t i = 0; i < 4; ++i) {
        from[i] = slot * 4 + i;
        to[i] = blocks - 1 - (i * slots + slot);
      }
      Pieces pieces;
      for (std::size_t i = 0; i < 4; ++i) pieces.add(from[i] * block_bytes, to[i] * block_bytes, block_bytes);
      const auto plans = pair.prepare(pieces);
      prefill_requests.push_back({plans.first, from, to});
      decode_requests.push_back({plans.second, from, to});
    }
  }

  struct Results {
    LoopResult prefill, decode;
  };
  Results run(LoopSettings set) {
    set.seed = seed;
    if (set.stall_ns == 0) set.stall_ns = 20 * second;
    Results results;
    const auto side = [&set](Side which) {
      LoopSettings mine = set;
      mine.side = which;
      return mine;
    };
    together(
        [&] {
          results.prefill = run_loop(*pair.a.context, *pair.a.peer, prefill_requests, prefill, side(Side::prefill));
        },
        [&] { results.decode = run_loop(*pair.b.context, *pair.b.peer, decode_requests, decode, side(Side::decode)); });
    return results;
  }
};

void check_samples(const Rotation::Results& results, Op op, std::size_t count) {
  const LoopResult& initiator = op == Op::push ? results.prefill : results.decode;
  const LoopResult& passive = op == Op::push ? results.decode : results.prefill;
  CHECK_EQ(initiator.transfer_ns.size(), count);
  CHECK_EQ(initiator.post_ns.size(), count);
  CHECK_EQ(passive.transfer_ns.size(), 0U);
  CHECK_EQ(results.prefill.handover_ns.size(), count);
  CHECK_EQ(results.decode.handover_ns.size(), 0U);
  for (const Nanoseconds ns : initiator.transfer_ns) CHECK(ns > 0);
  for (const Nanoseconds ns : results.prefill.handover_ns) CHECK(ns > 0);
  CHECK(initiator.wall_ns > 0 && passive.wall_ns > 0);
}

TEST(loop, push_and_pull_with_one_and_eight_in_flight) {
  Rotation rotation(8);
  std::uint64_t epoch = 1;
  for (const Op op : {Op::push, Op::pull})
    for (const std::uint32_t inflight : {1U, 8U}) {
      const auto results = rotation.run({.op = op, .first_epoch = epoch, .count = 100, .inflight = inflight});
      check_samples(results, op, 100);
      CHECK_EQ(results.decode.wrong_epochs, 0U);
      epoch += 100;
      const LoopRequest& last = rotation.decode_requests[(epoch - 1) % 8];
      CHECK_EQ(verify(rotation.decode, last.decode_table, last.prefill_table, seed, epoch - 1, 1).wrong_words, 0U);
    }
}

// One side enters the next loop while the other has not left this one.
TEST(loop, loops_that_follow_each_other_closely_do_not_mix) {
  Rotation rotation(4);
  for (std::uint64_t epoch = 1; epoch < 400; epoch += 2)
    CHECK_EQ(rotation.run({.first_epoch = epoch, .count = 2, .inflight = 2}).decode.wrong_epochs, 0U);
  const auto many = [](Context& context, Peer& peer, std::vector<LoopRequest>& requests, PoolView& pool, Side side) {
    for (std::uint64_t epoch = 1000; epoch < 1400; epoch += 2)
      run_loop(context, peer, requests, pool,
               {.side = side, .first_epoch = epoch, .count = 2, .inflight = 2, .seed = seed, .stall_ns = 20 * second});
  };
  together(
      [&] {
        many(*rotation.pair.a.context, *rotation.pair.a.peer, rotation.prefill_requests, rotation.prefill,
             Side::prefill);
      },
      [&] {
        many(*rotation.pair.b.context, *rotation.pair.b.peer, rotation.decode_requests, rotation.decode, Side::decode);
      });
}

TEST(loop, epochs_of_a_backend_that_moves_nothing_are_wrong) {
  Rotation rotation(2, "null");
  CHECK_EQ(rotation.run({.first_epoch = 1, .count = 10}).decode.wrong_epochs, 40U);
  CHECK_EQ(rotation.run({.first_epoch = 11, .count = 10, .check = false}).decode.wrong_epochs, 0U);
}

TEST(loop, a_plan_that_swaps_two_blocks_has_wrong_epochs) {
  Rotation rotation(1);
  std::swap(rotation.decode_requests[0].decode_table[0], rotation.decode_requests[0].decode_table[1]);
  CHECK_EQ(rotation.run({.first_epoch = 1, .count = 5}).decode.wrong_epochs, 10U);
}

TEST(loop, wrong_settings_are_refused) {
  Rotation rotation(2);
  End& a = rotation.pair.a;
  const auto run = [&](LoopSettings set) {
    return run_loop(*a.context, *a.peer, rotation.prefill_requests, rotation.prefill, set);
  };
  CHECK_THROWS(Fault::usage, "a loop needs", run({.count = 0, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run({.inflight = 0, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run({.stall_ns = 0}));
  CHECK_THROWS(Fault::usage, "overwrite each other", run({.count = 3, .inflight = 3, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run_loop(*a.context, *a.peer, {}, rotation.prefill, {.stall_ns = second}));
}

TEST(loop, a_peer_that_stands_still_is_an_error_after_the_stall_time) {
  Rotation rotation(1);
  for (const Side side : {Side::prefill, Side::decode}) {
    const Nanoseconds began = now_ns();
    CHECK_THROWS(Fault::peer_lost, "nothing moved for 100 ms",
                 run_loop(*rotation.pair.a.context, *rotation.pair.a.peer, rotation.prefill_requests, rotation.prefill,
                          {.side = side, .stall_ns = 100'000'000}));
    CHECK(now_ns() - began >= 100'000'000);
    CHECK(now_ns() - began < 5 * second);
  }
}

TEST(loop, a_peer_that_dies_ends_the_loop_of_either_side) {
  for (const bool prefill_dies : {false, true}) {
    Rotation rotation(4);
    const std::jthread dies([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      (prefill_dies ? rotation.pair.a : rotation.pair.b).context->close();
    });
    const Nanoseconds began = now_ns();
    CHECK_THROWS(Fault::peer_lost, "", rotation.run({.op = Op::push, .count = 10'000'000, .inflight = 4}));
    CHECK(now_ns() - began < 10 * second);
  }
}

// What one more request costs: nothing, once every vector has grown.
TEST(loop, a_request_allocates_nothing) {
  for (const char* backend : {"tcp", "null"}) {
    Rotation rotation(8, backend);
    std::uint64_t epoch = 1;
    const auto allocations_of = [&](Op op, std::uint32_t count) {
      const std::uint64_t before = allocations();
      rotation.run({.op = op, .first_epoch = epoch, .count = count, .inflight = 8});
      epoch += count;
      return allocations() - before;
    };
    for (const Op op : {Op::push, Op::pull}) {
      allocations_of(op, 500);
      const std::uint64_t few = allocations_of(op, 20);
      const std::uint64_t many = allocations_of(op, 1000);
      CHECK(many <= few + 4);  // a slot beyond those used so far may be opened for the first time
    }
  }
}

}  // namespace
}  // namespace kvxfer::test
