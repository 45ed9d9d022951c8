// Every wait ends: at its deadline, not before it, and not much later.
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr Nanoseconds short_wait = 50'000'000;
constexpr Nanoseconds bound =
    5 * second;  // a busy machine is late; an engine with a time-out of its own is not so late

// `early`: it may end before its deadline, since it cannot succeed any more.
template <typename Wait>
void require_in_time(Nanoseconds wait_ns, const Wait& wait) {
  const Nanoseconds began = now_ns();
  wait(Deadline(began + wait_ns));
  const Nanoseconds took = now_ns() - began;
  if (took < wait_ns) throw Failure("a wait of " + std::to_string(wait_ns) + " ns ended after " + std::to_string(took));
  if (took > wait_ns + bound)
    throw Failure("a wait of " + std::to_string(wait_ns) + " ns took " + std::to_string(took) + " ns");
}

CHECK_BACKEND(deadline, of_poll, all) {
  Rig rig(subject, {4096});
  const auto alone = subject.open();
  Event event;
  for (Context* context : {rig.a.context.get(), alone.get()})
    for (const Nanoseconds ns : {Nanoseconds{0}, short_wait})
      require_in_time(ns, [&](Deadline deadline) { CHECK_EQ(context->poll({&event, 1}, deadline), 0U); });
  CHECK_EQ(rig.a.context->poll({&event, 1}, Deadline(0)), 0U);  // passed long ago
}

CHECK_BACKEND(deadline, of_progress, all) {
  Rig rig(subject, {4096});
  for (const Nanoseconds ns : {Nanoseconds{0}, short_wait}) {
    const Nanoseconds began = now_ns();
    rig.a.context->progress(Deadline::after(ns));  // may return at once
    CHECK(now_ns() - began < ns + bound);
  }
}

CHECK_BACKEND(deadline, of_accept, all) {
  const auto context = subject.open();
  context->listen("127.0.0.1", 0);
  for (const Nanoseconds ns : {Nanoseconds{0}, short_wait})
    require_in_time(ns, [&](Deadline deadline) { CHECK_THROWS(Fault::peer_lost, "", context->accept(deadline)); });
}

CHECK_BACKEND(deadline, of_connect, all) {
  const auto listens = subject.open();
  const std::string endpoint = listens->listen("127.0.0.1", 0);  // and never accepts
  const auto context = subject.open();
  for (const Nanoseconds ns : {Nanoseconds{0}, short_wait})
    require_in_time(
        ns, [&](Deadline deadline) { CHECK_THROWS(Fault::peer_lost, "", context->connect(endpoint, deadline)); });
}

CHECK_BACKEND(deadline, of_prepare, all) {
  for (const Nanoseconds ns : {Nanoseconds{0}, short_wait}) {
    Rig rig(subject, {4096});
    require_in_time(ns, [&](Deadline deadline) {
      CHECK_THROWS(Fault::peer_lost, "", rig.a.prepare_with(*rig.a.peer, one_piece(8), deadline));
    });
  }
}

// A peer that nobody polls any more may not hold up whoever arms or posts to it.
CHECK_BACKEND(deadline, nothing_else_waits, all) {
  Rig rig(subject, {1 << 16});
  const Plans plans = rig.prepare(one_piece(1 << 16));
  const Nanoseconds began = now_ns();
  for (std::uint64_t tag = 1; tag <= 8; ++tag) rig.arm(plans, subject.ops().front(), tag);
  if (!subject.can.needs_arm)
    rig.initiator(subject.ops().front())
        .context->post(rig.of_initiator(plans, subject.ops().front()), subject.ops().front(), {}, 1, nullptr);
  for (std::uint64_t tag = 1; tag <= 8; ++tag) rig.b.context->release(*rig.b.peer, tag);
  CHECK(now_ns() - began < bound);
}

}  // namespace
}  // namespace kvxfer::test
