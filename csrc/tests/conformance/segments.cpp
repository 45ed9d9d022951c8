// Parts of a plan, sent apart.
#include <algorithm>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 64 * 4096;

CHECK_BACKEND(segments, in_any_order_move_their_pieces_and_no_others, all) {
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(64, 4096, 8);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    rig.poison_target();
    Segments moved;
    std::uint64_t tag = 1;
    for (const Segments& some : {Segments{6, 2}, {7}, {0, 1, 3}, {5}, {4}}) {
      rig.move(plans, op, tag++, some);
      moved.insert(moved.end(), some.begin(), some.end());
      rig.require_moved_segments(pieces, moved);
    }
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(segments, a_tag_for_each_and_the_last_first, all) {
  Rig rig(subject, {bytes});
  const std::uint32_t tags = std::min<std::uint32_t>(16, subject.can.max_inflight);
  const PlanPieces pieces = shuffled(4 * tags, 4001, 4);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    rig.poison_target();
    for (std::uint32_t s = tags; s-- > 0;) rig.post(plans, op, 100 + s, {s});
    for (std::uint32_t s = 0; s < tags; ++s) rig.complete(op, 100 + s);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(segments, that_a_plan_has_not_are_refused, all) {
  Rig rig(subject, {bytes});
  const PlanPieces pieces = shuffled(4, 64, 2);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops())
    for (const Segments& wrong : {Segments{2}, {0, UINT32_MAX}, {1, 0, 1}}) {
      End& initiator = rig.initiator(op);
      if (subject.can.needs_arm) {  // armed for all: what is wrong is the post
        rig.arm(plans, op, 1);
        rig.wait(initiator, EventKind::armed, 1);
      }
      CHECK_THROWS(Fault::usage, "segment",
                   initiator.context->post(rig.of_initiator(plans, op), op, wrong, 1, nullptr));
      CHECK_THROWS(Fault::usage, "segment", rig.passive(op).context->arm(rig.of_passive(plans, op), op, wrong, 2));
    }
  for (const Op op : subject.ops()) rig.move(plans, op, 1);  // the refused tag is free
  rig.require_moved(pieces);
}

}  // namespace
}  // namespace kvxfer::test
