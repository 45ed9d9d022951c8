// What the measuring loop makes of the doubles: true figures of the good one, errors or wrong bytes of the others, and
// never a wait without end.
#include <algorithm>

#include "tests/doubles/doubles.h"
#include "tests/rotation.h"

namespace kvxfer::test {
namespace {

constexpr Nanoseconds stall = 500'000'000;

// Bytes go to the hub, which listens.
struct Double : Rotation {
  explicit Double(std::unique_ptr<Context> (*opener)(), std::uint32_t slots = 2, std::size_t leaf_count = 1)
      : Rotation(slots, opener, leaf_count, Side::decode) {}

  // Both sides end with an error, each in time.
  void require_lost(Op op, const char* says) {
    const Nanoseconds began = now_ns();
    start_and_wait({.op = op, .count = 50, .inflight = 2, .stall_ns = stall});
    CHECK(now_ns() - began < stall + 10 * second);
    bool said = false;
    for (const Node* node : {&hub, &leaves[0]}) {
      try {
        node->require_well();
      } catch (const Error& error) {
        CHECK(error.fault() == Fault::peer_lost);
        said = said || std::string(error.what()).find(says) != std::string::npos;
        continue;
      }
      throw Failure("a side of the loop ended well");
    }
    if (!said) throw Failure(std::string("neither side said: ") + says);
  }
};

TEST(doubles_loop, a_two_sided_backend_is_measured) {
  for (const std::size_t leaves : {1U, 3U})
    for (const std::uint32_t inflight : {1U, 8U}) {
      Double rotation(two_sided, 8, leaves);
      std::uint64_t epoch = 1;
      for (int loop = 0; loop < 3; ++loop, epoch += 40) {  // one after another: nobody polls in between
        rotation.run({.first_epoch = epoch, .count = 40, .inflight = inflight});
        CHECK_EQ(rotation.wrong_epochs(), 0U);
        rotation.check_data(epoch + 39);
        for (const Node& leaf : rotation.leaves) {
          CHECK_EQ(leaf.result.transfer_ns.size(), 40U);
          for (const Nanoseconds ns : leaf.result.transfer_ns) CHECK(ns > 0 && ns <= leaf.result.wall_ns);
        }
      }
    }
}

TEST(doubles_loop, local_completion_is_not_the_time_of_a_transfer) {
  for (const Op op : {Op::push, Op::pull}) {
    Double rotation(local_before_delivery);
    rotation.run({.op = op, .count = 4});
    CHECK_EQ(rotation.wrong_epochs(), 0U);
    const Node& initiator = op == Op::push ? rotation.leaves[0] : rotation.hub;
    CHECK_EQ(initiator.result.transfer_ns.size(), 4U);
    for (const Nanoseconds ns : initiator.result.transfer_ns) CHECK(ns >= delay);
    for (const Nanoseconds ns : rotation.leaves[0].result.handover_ns) CHECK(ns >= delay);
    for (const Nanoseconds ns : initiator.result.post_ns) CHECK(ns < delay);
  }
}

// What no measuring can find: decode has every byte, but later than prefill believes. The suite finds it.
TEST(doubles_loop, a_confirmation_before_delivery_is_believed) {
  Double rotation(confirmed_before_delivery);
  rotation.run({.count = 2});
  CHECK_EQ(rotation.wrong_epochs(), 0U);
  for (const Nanoseconds ns : rotation.leaves[0].result.transfer_ns) CHECK(ns < delay);
}

TEST(doubles_loop, swapped_pieces_have_wrong_epochs_and_wrong_bytes) {
  for (const Op op : {Op::push, Op::pull}) {
    Double rotation(two_pieces_swapped);
    rotation.run({.op = op, .count = 5});
    CHECK_EQ(rotation.wrong_epochs(), 10U);  // two pieces of each request
    CHECK_EQ(rotation.hub.wrong_words(1, 5), 2 * ((piece_bytes + 7) / 8));
  }
}

// Epochs are in the first word of a piece: a byte elsewhere is for the full comparison to find.
TEST(doubles_loop, a_flipped_byte_is_a_wrong_byte) {
  for (const Op op : {Op::push, Op::pull}) {
    Double rotation(one_byte_flipped, 1);
    rotation.run({.op = op, .count = 1});
    CHECK_EQ(rotation.hub.wrong_words(0, 1), 1U);
    const Verification seen = verify(rotation.hub.regions, rotation.hub.requests[0].legs[0].pieces, seed, 1, 1);
    CHECK_EQ(seen.piece, 0U);
    CHECK_EQ(seen.word, (piece_bytes - 1) / 8);
  }
}

TEST(doubles_loop, a_side_that_dies_is_lost) {
  for (const Op op : {Op::push, Op::pull}) {
    Double rotation(dies_after_bytes);
    rotation.require_lost(op, "the peer was lost");
  }
}

TEST(doubles_loop, one_that_never_answers_is_lost_after_the_stall_time) {
  for (const Op op : {Op::push, Op::pull}) {
    Double rotation(never_answers);
    rotation.require_lost(op, "nothing moved for 500 ms");
  }
}

TEST(doubles_loop, garbage_is_an_error) {
  for (const Op op : {Op::push, Op::pull}) {
    Double wild(answers_garbage);
    wild.require_lost(op, "");
    Double strangers(answers_of_strangers);
    strangers.require_lost(op, "nothing moved for 500 ms");
    Double twice(says_everything_twice);
    twice.require_lost(op, "out of turn");
  }
}

TEST(doubles_loop, a_claim_that_is_not_kept_is_an_error) {
  const auto refused = [](std::unique_ptr<Context> (*open)(), Op op, Fault fault, const char* says) {
    Double rotation(open);
    rotation.start_and_wait({.op = op, .count = 4, .stall_ns = stall});
    const Node& initiator = op == Op::push ? rotation.leaves[0] : rotation.hub;
    CHECK_THROWS(fault, says, initiator.require_well());
  };
  refused(claims_pull, Op::pull, Fault::usage, "this backend has no pull");
  Double nothing(claims_to_move_data);
  nothing.run({.count = 4});
  CHECK_EQ(nothing.wrong_epochs(), 4 * pieces_per_leg);
}

}  // namespace
}  // namespace kvxfer::test
