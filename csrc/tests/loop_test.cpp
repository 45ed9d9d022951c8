#include <algorithm>
#include <atomic>
#include <mutex>

#include "tests/allocations.h"
#include "tests/rotation.h"
#include "tests/script.h"

namespace kvxfer::test {
namespace {

void check_samples(const Rotation& rotation, Op op, std::size_t count) {
  for (const Side side : {Side::prefill, Side::decode})
    for (const Node* node : rotation.nodes(side)) {
      const LoopResult& result = node->result;
      const bool initiator = (op == Op::push) == (side == Side::prefill);
      CHECK_EQ(result.transfer_ns.size(), initiator ? count : 0);
      CHECK_EQ(result.post_ns.size(), initiator ? count : 0);
      CHECK_EQ(result.handover_ns.size(), side == Side::prefill ? count : 0);
      for (const auto* samples : {&result.transfer_ns, &result.handover_ns})
        for (const Nanoseconds ns : *samples) CHECK(ns > 0);
      for (std::size_t i = 0; i < result.post_ns.size(); ++i)
        CHECK(result.post_ns[i] > 0 && result.post_ns[i] < result.wall_ns);
      for (const Nanoseconds ns : result.transfer_ns) CHECK(ns <= result.wall_ns);
      CHECK(result.wall_ns > 0);
      CHECK(result.checking_cpu_ns > 0);
      CHECK(result.checking_cpu_ns < 30 * second);
    }
}

TEST(loop, push_and_pull_with_one_and_eight_in_flight) {
  Rotation rotation(8);
  std::uint64_t epoch = 1;
  for (const Op op : {Op::push, Op::pull})
    for (const std::uint32_t inflight : {1U, 8U}) {
      rotation.run({.op = op, .first_epoch = epoch, .count = 100, .inflight = inflight});
      check_samples(rotation, op, 100);
      CHECK_EQ(rotation.wrong_epochs(), 0U);
      epoch += 100;
      rotation.check_data(epoch - 1);
    }
}

TEST(loop, several_legs_from_and_to_either_side) {
  for (const std::size_t leaf_count : {2U, 4U})
    for (const Side hub_side : {Side::prefill, Side::decode}) {
      Rotation rotation(8, "tcp", leaf_count, hub_side);
      std::uint64_t epoch = 1;
      for (const Op op : {Op::push, Op::pull})
        for (const std::uint32_t inflight : {1U, 8U}) {
          rotation.run({.op = op, .first_epoch = epoch, .count = 50, .inflight = inflight});
          check_samples(rotation, op, 50);
          CHECK_EQ(rotation.wrong_epochs(), 0U);
          epoch += 50;
          rotation.check_data(epoch - 1);
        }
    }
}

// One side enters the next loop while the other has not left this one.
TEST(loop, loops_that_follow_each_other_closely_do_not_mix) {
  Rotation rotation(4);
  for (std::uint64_t epoch = 1; epoch < 400; epoch += 2) {
    rotation.run({.first_epoch = epoch, .count = 2, .inflight = 2});
    CHECK_EQ(rotation.wrong_epochs(), 0U);
  }
  const auto many = [](Node& node, Side side) {
    for (std::uint64_t epoch = 1000; epoch < 1400; epoch += 2) {
      node.run(side, {.first_epoch = epoch, .count = 2, .inflight = 2});
      node.require_well();
    }
  };
  together([&] { many(rotation.hub, Side::prefill); }, [&] { many(rotation.leaves[0], Side::decode); });
}

// A peer that is done with its legs may be a loop ahead of the others.
TEST(loop, loops_of_several_peers_that_follow_each_other_closely_do_not_mix) {
  for (const Side hub_side : {Side::prefill, Side::decode}) {
    Rotation rotation(4, "tcp", 4, hub_side);
    std::atomic<std::uint64_t> wrong{0};
    std::exception_ptr failed;
    std::mutex mutex;
    const auto many = [&](Node& node, Side side) {
      std::uint64_t epoch = 1;
      for (int round = 0; round < 100 && !node.failed; ++round) {
        const Op op = round % 3 == 2 ? Op::pull : Op::push;
        const std::uint32_t count = 1 + static_cast<std::uint32_t>(round) % 4;
        node.run(side, {.op = op, .first_epoch = epoch, .count = count, .inflight = count});
        epoch += count;
        wrong += node.result.wrong_epochs;
      }
      if (!node.failed) return;
      node.context->close();  // so that the others need not wait for their stall time
      const std::lock_guard lock(mutex);
      if (!failed) failed = node.failed;
    };
    {
      std::vector<std::jthread> threads;
      for (Node& leaf : rotation.leaves) threads.emplace_back([&] { many(leaf, other(hub_side)); });
      many(rotation.hub, hub_side);
    }
    if (failed) std::rethrow_exception(failed);
    CHECK_EQ(wrong.load(), 0U);
  }
}

TEST(loop, epochs_of_a_backend_that_moves_nothing_are_wrong) {
  for (const std::size_t leaf_count : {1U, 3U}) {
    Rotation rotation(2, "null", leaf_count);
    rotation.run({.first_epoch = 1, .count = 10});
    CHECK_EQ(rotation.wrong_epochs(), 40U * leaf_count);
    rotation.run({.first_epoch = 11, .count = 10, .check = false});
    CHECK_EQ(rotation.wrong_epochs(), 0U);
    CHECK_EQ(rotation.hub.result.checking_cpu_ns, 0);
  }
}

TEST(loop, a_plan_that_swaps_two_pieces_has_wrong_epochs) {
  for (const std::size_t leaf_count : {1U, 2U}) {
    Rotation rotation(1, "tcp", leaf_count);
    auto& offsets = rotation.leaves.back().requests[0].legs[0].pieces.source_offsets;
    std::swap(offsets[0], offsets[1]);
    rotation.run({.first_epoch = 1, .count = 5});
    CHECK_EQ(rotation.wrong_epochs(), 10U);
    CHECK_EQ(rotation.leaves.back().result.wrong_epochs, 10U);
  }
}

TEST(loop, legs_without_pieces_are_not_checked) {
  Rotation rotation(2, "null", 2);
  for (Node* node : {&rotation.hub, &rotation.leaves[0], &rotation.leaves[1]})
    for (LoopRequest& request : node->requests)
      for (Leg& leg : request.legs) leg.pieces = {};
  rotation.run({.first_epoch = 1, .count = 10});
  CHECK_EQ(rotation.wrong_epochs(), 0U);
}

TEST(loop, wrong_settings_are_refused) {
  Rotation rotation(2, "tcp", 2);
  Node& hub = rotation.hub;
  const auto run = [&](LoopSettings set) { return run_loop(*hub.context, hub.requests, hub.regions, set); };
  CHECK_THROWS(Fault::usage, "a loop needs", run({.count = 0, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run({.inflight = 0, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run({.stall_ns = 0}));
  CHECK_THROWS(Fault::usage, "overwrite each other", run({.count = 3, .inflight = 3, .stall_ns = second}));
  CHECK_THROWS(Fault::usage, "a loop needs", run_loop(*hub.context, {}, hub.regions, {.stall_ns = second}));

  const std::vector<LoopRequest> good = hub.requests;
  const auto run_with = [&](std::vector<Leg> first, std::vector<Leg> second_legs) {
    hub.requests = {{std::move(first)}, {std::move(second_legs)}};
    return run({.stall_ns = second});
  };
  const auto& legs = good[0].legs;
  CHECK_THROWS(Fault::usage, "needs a leg", run_with({}, {}));
  CHECK_THROWS(Fault::usage, "legs of the same peers", run_with(legs, {}));
  CHECK_THROWS(Fault::usage, "legs of the same peers", run_with({legs[0]}, {legs[1]}));
  CHECK_THROWS(Fault::usage, "legs of the same peers", run_with({legs[0], legs[1]}, {legs[0], legs[0]}));
  CHECK_THROWS(Fault::usage, "two legs of one peer", run_with({legs[0], legs[0]}, {legs[0], legs[0]}));
  const Leg strange{legs[0].peer, legs[1].plan, legs[0].pieces};
  CHECK_THROWS(Fault::usage, "prepared with another peer", run_with({legs[0], legs[1]}, {strange, legs[1]}));
}

TEST(loop, a_peer_that_stands_still_is_an_error_after_the_stall_time) {
  for (const std::size_t leaf_count : {1U, 3U}) {
    Rotation rotation(1, "tcp", leaf_count);
    const Node& hub = rotation.hub;
    for (const Side side : {Side::prefill, Side::decode}) {
      const Nanoseconds began = now_ns();
      CHECK_THROWS(Fault::peer_lost, "nothing moved for 100 ms",
                   run_loop(*hub.context, hub.requests, hub.regions, {.side = side, .stall_ns = 100'000'000}));
      CHECK(now_ns() - began >= 100'000'000);
      CHECK(now_ns() - began < 5 * second);
    }
  }
}

// Two of three peers go on, and their loops end when that one does not.
TEST(loop, one_of_several_peers_that_stands_still_is_an_error) {
  Rotation rotation(1, "tcp", 3);
  const LoopSettings set{.count = 3, .stall_ns = 300'000'000};
  {
    std::vector<std::jthread> threads;
    for (const std::size_t l : {0U, 2U}) threads.emplace_back([&, l] { rotation.leaves[l].run(Side::decode, set); });
    rotation.hub.run(Side::prefill, set);
  }
  for (const Node* node : {&rotation.hub, &rotation.leaves[0], &rotation.leaves[2]})
    CHECK_THROWS(Fault::peer_lost, "nothing moved for 300 ms", node->require_well());
}

TEST(loop, a_peer_that_dies_ends_the_loop_of_either_side) {
  for (const Op op : {Op::push, Op::pull})
    for (const bool prefill_dies : {false, true}) {
      Rotation rotation(4);
      const std::jthread dies([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        (prefill_dies ? rotation.hub : rotation.leaves[0]).context->close();
      });
      const Nanoseconds began = now_ns();
      rotation.start_and_wait({.op = op, .count = 500'000, .inflight = 4});
      for (const Node* node : {&rotation.hub, &rotation.leaves[0]})
        CHECK_THROWS(Fault::peer_lost, "", node->require_well());
      CHECK(now_ns() - began < 10 * second);
    }
}

TEST(loop, one_of_several_peers_that_dies_ends_the_loop) {
  for (const Op op : {Op::push, Op::pull})
    for (const Side hub_side : {Side::prefill, Side::decode}) {
      Rotation rotation(4, "tcp", 3, hub_side);
      const LoopSettings set{.op = op, .count = 500'000, .inflight = 4};
      std::vector<std::jthread> threads;
      for (Node& leaf : rotation.leaves) threads.emplace_back([&] { leaf.run(other(hub_side), set); });
      threads.emplace_back([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        rotation.leaves[1].context->close();
      });
      const Nanoseconds began = now_ns();
      rotation.hub.run(hub_side, set);
      CHECK_THROWS(Fault::peer_lost, "the peer was lost: the peer closed the connection", rotation.hub.require_well());
      CHECK(now_ns() - began < 5 * second);
      for (const std::size_t alive : {0U, 2U}) CHECK_EQ(rotation.hub.peers[alive]->lost(), "");
      rotation.hub.context->close();  // as its process does; the others know nothing of the one that died
      threads.clear();
      for (const Node& leaf : rotation.leaves) CHECK_THROWS(Fault::peer_lost, "", leaf.require_well());
      CHECK(now_ns() - began < 10 * second);
    }
}

// What one more request costs: nothing, once every vector has grown. With every backend that is there.
TEST(loop, a_request_allocates_nothing) {
  for (const BackendRow& backend : backends())
    for (const std::size_t leaf_count : {1U, 4U}) {
      if (!backend.probe().available) continue;
      Rotation rotation(8, backend.name, leaf_count);
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
        CHECK(many <= few + 4 * leaf_count);  // a slot beyond those used so far may be opened for the first time
      }
    }
}

// --- against a context that says what it is told to

TEST(loop, a_request_is_posted_when_all_legs_are_armed_and_ends_with_the_last) {
  Script script(3);
  const Nanoseconds later = now_ns() + 1000 * second;
  for (const std::uint32_t peer : {2U, 0U, 1U}) script.say(EventKind::armed, peer, 5);
  script.say(EventKind::confirmed, 1, 5, later + 20 * second);
  script.say(EventKind::confirmed, 2, 5, later + 30 * second);
  script.say(EventKind::released, 2, 5);
  script.say(EventKind::confirmed, 0, 5, later + 10 * second);  // queued last, but not the last to happen
  for (const std::uint32_t peer : {1U, 0U}) script.say(EventKind::released, peer, 5);
  const LoopResult result =
      run_loop(script, script.requests(1, 3), {}, {.side = Side::prefill, .first_epoch = 5, .stall_ns = second});
  CHECK_EQ(script.take_log(), "post 0 5; post 1 5; post 2 5; ");
  for (const Nanoseconds ns : {result.transfer_ns[0], result.handover_ns[0], result.wall_ns}) {
    CHECK(ns > 1020 * second);
    CHECK(ns <= 1030 * second);
  }
  CHECK(script.events.empty());
}

TEST(loop, decode_releases_a_request_when_all_legs_are_delivered) {
  Script script(2);
  script.say(EventKind::delivered, 1, 1);
  script.say(EventKind::delivered, 1, 2);
  script.say(EventKind::delivered, 0, 2);
  script.say(EventKind::delivered, 0, 1);
  run_loop(script, script.requests(2, 2), {}, {.side = Side::decode, .count = 2, .inflight = 2, .stall_ns = second});
  CHECK_EQ(script.take_log(),
           "arm 0 1; arm 1 1; arm 0 2; arm 1 2; release 0 2; release 1 2; release 0 1; release 1 1; ");
}

TEST(loop, what_peers_say_of_the_next_loop_is_put_back) {
  Script script(3);
  script.say(EventKind::armed, 0, 1);
  script.say(EventKind::armed, 2, 2);  // a peer that is in no leg of this loop
  script.say(EventKind::armed, 1, 1);
  for (const std::uint32_t peer : {0U, 1U}) {
    script.say(EventKind::confirmed, peer, 1, now_ns() + second);
    script.say(EventKind::released, peer, 1);
    if (peer == 0)
      for (const std::uint64_t tag : {2U, 3U}) script.say(EventKind::armed, 0, tag);
  }
  script.say(EventKind::armed, 1, 2);  // after the last: not even taken
  run_loop(script, script.requests(2, 2), {}, {.stall_ns = second});
  CHECK_EQ(script.take_log(), "post 0 1; post 1 1; put back 2 2; put back 0 2; put back 0 3; ");
  CHECK_EQ(script.events.size(), 1U);
}

TEST(loop, nonsense_of_a_peer_ends_the_loop) {
  const auto run = [](auto say, std::size_t legs = 1) {
    Script script(2);
    say(script);
    return run_loop(script, script.requests(1, legs), {}, {.first_epoch = 7, .count = 2, .stall_ns = second});
  };
  for (const EventKind kind : {EventKind::confirmed, EventKind::released})
    for (const std::uint64_t tag : {0U, 6U, 9U})
      CHECK_THROWS(Fault::peer_lost, "speaks of request " + std::to_string(tag),
                   run([&](Script& script) { script.say(kind, 0, tag); }));
  CHECK_THROWS(Fault::peer_lost, "speaks of request 6",
               run([](Script& script) { script.say(EventKind::armed, 0, 6); }));
  CHECK_THROWS(Fault::peer_lost, "arm requests that are not running", run([](Script& script) {
                 for (std::uint64_t i = 0; i < 10'000; ++i) script.say(EventKind::armed, 0, 100 + i);
               }));
  CHECK_THROWS(Fault::peer_lost, "the peer was lost: gone",
               run(
                   [](Script& script) {
                     script.peers[1]->why = "gone";
                     script.say(EventKind::peer_lost, 1, 0);
                   },
                   2));
  CHECK_THROWS(Fault::peer_lost, "ended before it was delivered",
               run([](Script& script) { script.say(EventKind::cancelled, 0, 7); }));
  CHECK_THROWS(Fault::peer_lost, "request 7 out of turn",
               run(
                   [](Script& script) {
                     for (int i = 0; i < 2; ++i) script.say(EventKind::armed, 0, 7);  // counted for the second leg
                   },
                   2));
  CHECK_THROWS(Fault::peer_lost, "request 7 out of turn",
               run([](Script& script) { script.say(EventKind::confirmed, 0, 7, now_ns() + second); }));
  CHECK_THROWS(Fault::peer_lost, "request 7 ended before it began", run([](Script& script) {
                 script.say(EventKind::armed, 0, 7);
                 script.say(EventKind::confirmed, 0, 7, now_ns() - second);
               }));
  CHECK_THROWS(Fault::peer_lost, "no known kind",
               run([](Script& script) { script.say(static_cast<EventKind>(99), 0, 7); }));
  // Another peer of the context does not matter.
  CHECK_THROWS(Fault::peer_lost, "nothing moved", run([](Script& script) {
                 script.peers[1]->why = "gone";
                 script.say(EventKind::peer_lost, 1, 0);
               }));
}

}  // namespace
}  // namespace kvxfer::test
