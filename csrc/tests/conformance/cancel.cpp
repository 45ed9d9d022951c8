// Cancelled at any time: both sides tell the same single end, and the tag is free again.
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

CHECK_BACKEND(cancel, of_what_is_not_open_is_false, all) {
  Rig rig(subject, {1 << 16});
  const Plans plans = rig.prepare(one_piece(1 << 16));
  for (const Op op : subject.ops()) {
    End& initiator = rig.initiator(op);
    End& passive = rig.passive(op);
    CHECK(!initiator.context->cancel(*initiator.peer, 99));
    rig.move(plans, op, 1);
    CHECK(!initiator.context->cancel(*initiator.peer, 1));
    CHECK(!passive.context->cancel(*passive.peer, 1));
    rig.settle(5'000'000);
    for (const End* side : {&initiator, &passive}) CHECK_EQ(count(side->seen, EventKind::cancelled, 1), 0U);
  }
}

CHECK_BACKEND(cancel, by_the_passive_side_is_none, pushes) {
  ReadyFlag ready{0};  // outlives the contexts
  Rig rig(subject, {1 << 16});
  const Plans plans = rig.prepare(one_piece(1 << 16));
  rig.post(plans, Op::push, 1, {}, &ready);
  CHECK(!rig.b.context->cancel(*rig.b.peer, 1));
  ready = 1;
  rig.complete(Op::push, 1);
  rig.require_moved(one_piece(1 << 16));
}

CHECK_BACKEND(cancel, anywhere_on_its_way, all) {
  constexpr std::uint64_t bytes = std::uint64_t{sanitized ? 2 : 8} << 20;
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(bytes / 4096, 4096, bytes / 4096);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    End& initiator = rig.initiator(op);
    End& passive = rig.passive(op);
    for (int round = 0; round < 60; ++round) {
      rig.post(plans, op, 5);
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      initiator.context->cancel(*initiator.peer, 5);
      initiator.context->cancel(*initiator.peer, 5);  // once more is the same
      const EventKind mine = rig.wait_for_end(initiator, 5).kind;
      const EventKind theirs = rig.wait_for_end(passive, 5).kind;
      if (mine == EventKind::cancelled) {
        CHECK_EQ(name_of(theirs), std::string("cancelled"));
      } else {
        CHECK_EQ(name_of(mine), std::string("confirmed"));
        CHECK_EQ(name_of(theirs), std::string("delivered"));
      }
    }
    rig.settle(10'000'000);
    for (const End* side : {&initiator, &passive})
      for (const Event& event : side->seen)
        if (event.kind != EventKind::local) throw Failure(std::string("a second end: ") + name_of(event.kind));
    rig.poison_target();
    rig.move(plans, op, 5);
    rig.require_moved(pieces);
  }
}

}  // namespace
}  // namespace kvxfer::test
