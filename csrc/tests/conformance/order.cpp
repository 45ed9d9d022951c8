// The events of a transfer, and their order.
#include <algorithm>
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 64 * 4096;

CHECK_BACKEND(order, every_event_once_with_its_time_and_peer, all) {
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(64, 4096, 8);
  const Plans plans = rig.prepare(pieces);
  std::uint64_t tag = 7;
  for (const Op op : subject.ops())
    for (int round = 0; round < 20; ++round, ++tag) {
      End& initiator = rig.initiator(op);
      End& passive = rig.passive(op);
      const Nanoseconds before_arm = now_ns();
      rig.arm(plans, op, tag);
      const Event armed = rig.wait(initiator, EventKind::armed, tag);
      const Nanoseconds before_post = now_ns();
      initiator.context->post(rig.of_initiator(plans, op), op, {}, tag, nullptr);
      const Event confirmed = rig.wait(initiator, EventKind::confirmed, tag);
      const Event delivered = rig.wait(passive, EventKind::delivered, tag);
      const Nanoseconds before_release = now_ns();
      rig.b.context->release(*rig.b.peer, tag);
      const Event released = rig.wait(rig.a, EventKind::released, tag);

      CHECK(before_arm <= armed.time_ns && armed.time_ns <= before_post);
      CHECK(before_post <= confirmed.time_ns && confirmed.time_ns <= before_release);
      CHECK(before_post <= delivered.time_ns && delivered.time_ns <= before_release);
      CHECK(before_release <= released.time_ns && released.time_ns <= now_ns());
      if (const auto local = initiator.take(EventKind::local, tag))
        CHECK(op == Op::push && before_post <= local->time_ns && local->time_ns <= confirmed.time_ns);
      CHECK_EQ(armed.peer, initiator.peer->id());
      CHECK_EQ(confirmed.peer, initiator.peer->id());
      CHECK_EQ(delivered.peer, passive.peer->id());
      CHECK_EQ(released.peer, rig.a.peer->id());
    }
  rig.settle(20'000'000);
  for (const End* side : {&rig.a, &rig.b})
    for (const Event& event : side->seen) throw Failure(std::string("one more event: ") + name_of(event.kind));
}

// Tags are used once here: what comes late cannot be taken for an event of the next transfer.
CHECK_BACKEND(order, local_never_after_confirmed, pushes) {
  Rig rig(subject, {bytes});
  const Plans plans = rig.prepare(shuffled(4, 64, 4));
  const std::uint64_t rounds = sanitized ? 300 : 2000;
  for (std::uint64_t tag = 1; tag <= rounds; ++tag) {
    rig.post(plans, Op::push, tag);
    rig.complete(Op::push, tag);
    rig.a.take(EventKind::local, tag);
    rig.a.collect(Deadline(0));
    if (rig.a.take(EventKind::local, tag)) throw Failure("local came after confirmed");
  }
  rig.settle(20'000'000);
  for (const Event& event : rig.a.seen)
    if (event.kind == EventKind::local) throw Failure("local came after confirmed");
}

CHECK_BACKEND(order, after_local_the_source_may_be_written_over, pushes) {
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(64, 4096, 64);
  const Plans plans = rig.prepare(pieces);
  for (std::uint64_t epoch = 1; epoch <= 30; ++epoch) {
    rig.poison_target();
    stamp(Rig::extents(rig.a), Rig::at_source(pieces), pattern_seed, epoch);
    rig.post(plans, Op::push, epoch);
    const Deadline deadline = soon();
    bool done = false;
    while (!done && !rig.a.take(EventKind::local, epoch)) {
      if (deadline.passed()) throw Failure("neither local nor confirmed came");
      rig.b.collect(Deadline(0));
      rig.a.collect(Deadline(0));
      done = count(rig.a.seen, EventKind::confirmed, epoch) > 0;
    }
    stamp(Rig::extents(rig.a), Rig::at_source(pieces), pattern_seed, 0);
    rig.complete(Op::push, epoch);
    rig.require_moved(pieces, epoch);
  }
}

CHECK_BACKEND(order, confirmed_means_that_the_other_side_has_every_byte, pushes) {
  if (!order_is_seen_across_sides) return;
  Rig rig(subject, {4 << 20});
  const PlanPieces pieces = shuffled(1024, 4096, 1024);
  const Plans plans = rig.prepare(pieces);
  for (int round = 0; round < 10; ++round) {
    rig.poison_target();
    rig.post(plans, Op::push, 1);
    rig.wait(rig.a, EventKind::confirmed, 1);
    rig.require_moved(pieces);
    rig.wait(rig.b, EventKind::delivered, 1);
  }
}

CHECK_BACKEND(order, release_either_way, all) {
  Rig rig(subject, {bytes});
  const Plans plans = rig.prepare(shuffled(4, 64, 4));
  for (const Op op : subject.ops())
    for (const bool by_initiator : {false, true}) {
      rig.move(plans, op, 5);
      End& from = by_initiator ? rig.initiator(op) : rig.passive(op);
      End& to = by_initiator ? rig.passive(op) : rig.initiator(op);
      from.context->release(*from.peer, 5);
      rig.wait(to, EventKind::released, 5);
      rig.settle(5'000'000);
      CHECK_EQ(count(from.seen, EventKind::released, 5), 0U);
      CHECK_EQ(count(to.seen, EventKind::released, 5), 0U);
    }
}

bool needs_arm(const Capabilities& can) { return can.needs_arm; }

CHECK_BACKEND(order, a_post_before_its_arm_is_refused, needs_arm) {
  Rig rig(subject, {bytes});
  const Plans plans = rig.prepare(shuffled(4, 64, 4));
  for (const Op op : subject.ops()) {
    End& initiator = rig.initiator(op);
    CHECK_THROWS(Fault::usage, "arm", initiator.context->post(rig.of_initiator(plans, op), op, {}, 1, nullptr));
    rig.move(plans, op, 1);
    rig.settle(5'000'000);
    CHECK_THROWS(Fault::usage, "arm", initiator.context->post(rig.of_initiator(plans, op), op, {}, 1, nullptr));
  }
}

bool is_one_sided(const Capabilities& can) { return can.one_sided; }

CHECK_BACKEND(order, one_sided_needs_nothing_of_the_passive_application, is_one_sided) {
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    rig.poison_target();
    if (subject.can.needs_arm) rig.arm(plans, op, 1);
    if (subject.can.needs_arm) rig.initiator(op).wait(EventKind::armed, 1);
    rig.initiator(op).context->post(rig.of_initiator(plans, op), op, {}, 1, nullptr);
    rig.initiator(op).wait(EventKind::confirmed, 1);  // the other side is not polled
    rig.passive(op).wait(EventKind::delivered, 1);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(order, events_put_back_come_again_first, all) {
  Rig rig(subject, {bytes});
  const Plans plans = rig.prepare(shuffled(4, 64, 4));
  const Op op = subject.ops().front();
  for (const std::uint64_t tag : {1U, 2U}) rig.arm(plans, op, tag);
  End& initiator = rig.initiator(op);
  const Event events[] = {rig.wait(initiator, EventKind::armed, 1), rig.wait(initiator, EventKind::armed, 2)};
  rig.arm(plans, op, 3);
  initiator.context->put_back(events);
  rig.wait(initiator, EventKind::armed, 3);
  CHECK_EQ(initiator.seen.size(), 2U);
  CHECK_EQ(initiator.seen[0].tag, 1U);
  CHECK_EQ(initiator.seen[1].tag, 2U);
}

}  // namespace
}  // namespace kvxfer::test
