// Pushes that wait for a flag which whoever produces the bytes sets.
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 16 * 4096;

// Outlives the contexts that look at it, also when a check fails.
struct Flag {
  ReadyFlag ready{0};
};

struct Waiting : Flag, Rig {
  PlanPieces pieces = shuffled(16, 4096, 4);
  Plans plans;

  explicit Waiting(const Subject& subject) : Rig(subject, {bytes}), plans(prepare(pieces)) {}
  void require_waiting(std::uint64_t tag, const Segments& moved = {}) {
    settle(30'000'000);
    for (const End* side : {&a, &b})
      for (const Event& event : side->seen)
        if (event.tag == tag) throw Failure(std::string(name_of(event.kind)) + " came before the flag was set");
    require_moved_segments(pieces, moved);
  }
};

CHECK_BACKEND(ready, set_before_the_post, pushes) {
  Waiting rig(subject);
  rig.ready = 1;
  rig.post(rig.plans, Op::push, 1, {}, &rig.ready);
  rig.complete(Op::push, 1);
  rig.require_moved(rig.pieces);
}

CHECK_BACKEND(ready, set_after_the_post_with_any_value, pushes) {
  for (const std::uint32_t value : {1U, 2U, UINT32_MAX}) {
    Waiting rig(subject);
    rig.post(rig.plans, Op::push, 1, {}, &rig.ready);
    rig.require_waiting(1);
    rig.ready = value;
    rig.complete(Op::push, 1);
    rig.require_moved(rig.pieces);
  }
}

CHECK_BACKEND(ready, set_by_another_thread_while_this_one_waits, pushes) {
  Waiting rig(subject);
  for (std::uint64_t tag = 1; tag <= 20; ++tag) {
    rig.ready = 0;
    rig.poison_target();
    rig.post(rig.plans, Op::push, tag, {}, &rig.ready);
    together([&] { rig.complete(Op::push, tag); },
             [&] {
               std::this_thread::sleep_for(std::chrono::microseconds(200 * tag));
               rig.ready = 1;
             });
    rig.require_moved(rig.pieces);
  }
}

bool two_at_once(const Capabilities& can) { return pushes(can) && can.max_inflight >= 2; }

CHECK_BACKEND(ready, holds_up_no_other_push, two_at_once) {
  Waiting rig(subject);
  rig.post(rig.plans, Op::push, 1, {0}, &rig.ready);
  rig.move(rig.plans, Op::push, 2, {1});
  rig.require_waiting(1, {1});
  rig.ready = 1;
  rig.complete(Op::push, 1);
  rig.require_moved_segments(rig.pieces, {0, 1});
}

CHECK_BACKEND(ready, never_set_and_cancelled, pushes) {
  Waiting rig(subject);
  for (int round = 0; round < 3; ++round) {
    rig.post(rig.plans, Op::push, 4, {}, &rig.ready);
    CHECK(rig.a.context->cancel(*rig.a.peer, 4));
    for (End* side : {&rig.a, &rig.b}) CHECK_EQ(name_of(rig.wait_for_end(*side, 4).kind), std::string("cancelled"));
    rig.require_waiting(4);  // nothing more of it
  }
  rig.move(rig.plans, Op::push, 4);
  rig.require_moved(rig.pieces);
}

CHECK_BACKEND(ready, never_set_and_closed, pushes) {
  for (const bool initiator_closes : {false, true}) {
    Waiting rig(subject);
    rig.post(rig.plans, Op::push, 4, {}, &rig.ready);
    End& closes = initiator_closes ? rig.a : rig.b;
    closes.context->close();
    CHECK_EQ(name_of(rig.a.wait(EventKind::error, 4).kind), std::string("error"));
    if (!initiator_closes) rig.a.wait(EventKind::peer_lost, 0);
    rig.require_untouched();
  }
}

bool pulls(const Capabilities& can) { return can.pull; }

CHECK_BACKEND(ready, is_not_for_pulls, pulls) {
  Waiting rig(subject);
  rig.ready = 1;
  if (subject.can.needs_arm) {
    rig.arm(rig.plans, Op::pull, 1);
    rig.wait(rig.b, EventKind::armed, 1);
  }
  CHECK_THROWS(Fault::usage, "ready flag", rig.b.context->post(*rig.plans.second, Op::pull, {}, 1, &rig.ready));
  rig.move(rig.plans, Op::pull, 1);
}

}  // namespace
}  // namespace kvxfer::test
