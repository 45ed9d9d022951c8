// Several transfers at once, several peers, and tags.
#include <algorithm>
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

CHECK_BACKEND(inflight, one_and_sixteen_of_every_operation_at_once, all) {
  const std::uint32_t sixteen = std::min<std::uint32_t>(16, subject.can.max_inflight);
  for (const std::uint32_t inflight : {1U, sixteen}) {
    Rig rig(subject, {std::uint64_t{2} * 16 * 4 * 4096});
    const auto ops = subject.ops();
    const PlanPieces pieces = shuffled(4 * inflight * ops.size(), 4096, 4);
    const Plans plans = rig.prepare(pieces);
    for (int round = 0; round < 10; ++round) {
      rig.poison_target();
      for (std::uint32_t i = 0; i < inflight; ++i)
        for (std::uint32_t o = 0; o < ops.size(); ++o)
          rig.post(plans, ops[o], 1 + i + 1000 * o, {i * std::uint32_t(ops.size()) + o});
      for (std::uint32_t i = 0; i < inflight; ++i)
        for (std::uint32_t o = 0; o < ops.size(); ++o) rig.complete(ops[o], 1 + i + 1000 * o);
      rig.require_moved(pieces);
    }
  }
}

CHECK_BACKEND(inflight, as_many_as_promised_and_one_more_is_refused, pushes) {
  const std::uint32_t most = subject.can.max_inflight;
  ReadyFlag ready{0};  // outlives the contexts, also when a check fails
  Rig rig(subject, {std::uint64_t{2000} * (most + 1)});
  const PlanPieces pieces = shuffled(most, 2000, 1);  // a segment for each transfer
  const Plans plans = rig.prepare(pieces);
  for (int round = 0; round < 3; ++round) {
    rig.poison_target();
    ready = 0;
    for (std::uint32_t tag = 0; tag < most; ++tag) rig.post(plans, Op::push, tag, {tag}, &ready);
    CHECK_THROWS(Fault::unavailable, std::to_string(most), rig.post(plans, Op::push, most));
    ready = 1;
    for (std::uint32_t tag = 0; tag < most; ++tag) rig.complete(Op::push, tag);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(inflight, as_many_as_promised_without_a_flag, all) {
  const std::uint32_t most = subject.can.max_inflight;
  Rig rig(subject, {std::uint64_t{64} * most});
  const PlanPieces pieces = shuffled(most, 64, 1);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    rig.poison_target();
    for (std::uint32_t tag = 0; tag < most; ++tag) rig.post(plans, op, tag, {tag});
    for (std::uint32_t tag = 0; tag < most; ++tag) rig.complete(op, tag);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(tags, are_used_again_at_once, all) {
  Rig rig(subject, {1 << 16});
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  const int rounds = sanitized ? 200 : 1000;
  for (const Op op : subject.ops()) {
    for (int round = 0; round < rounds; ++round) {
      rig.post(plans, op, 7);
      rig.wait(rig.initiator(op), EventKind::confirmed, 7);  // delivered may be still to come
    }
    for (int round = 0; round < rounds; ++round) rig.wait(rig.passive(op), EventKind::delivered, 7);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(tags, that_are_open_are_refused, pushes) {
  ReadyFlag ready{0};  // outlives the contexts
  Rig rig(subject, {1 << 16});
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  rig.post(plans, Op::push, 7, {}, &ready);
  CHECK_THROWS(Fault::usage, "7", rig.post(plans, Op::push, 7));
  ready = 1;
  rig.complete(Op::push, 7);
  rig.require_moved(pieces);
  rig.settle(5'000'000);
  CHECK_EQ(count(rig.a.seen, EventKind::confirmed, 7), 0U);
}

CHECK_BACKEND(tags, of_any_value, all) {
  Rig rig(subject, {1 << 16});
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops())
    for (const std::uint64_t tag : {std::uint64_t{0}, std::uint64_t{1} << 32, UINT64_MAX >> 1, UINT64_MAX})
      rig.move(plans, op, tag);
}

// A hub that listens, and three that connect to it: each with a plan of its own, all moving at once under the same tag.
struct Star {
  static constexpr std::size_t leaf_count = 3;
  static constexpr std::uint64_t bytes = 32 * 1024;
  const Subject& subject;
  End hub;
  std::vector<End> leaves{leaf_count};
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<std::shared_ptr<Plan>> hubs, theirs;
  PlanPieces pieces = shuffled(32, 1024, 32);  // as the hub sees them; it has a region for each leaf

  explicit Star(const Subject& of) : subject(of), hubs(leaf_count), theirs(leaf_count) {
    hub.context = subject.open();
    for (End& leaf : leaves) {
      hub.allocate(bytes);
      leaf.context = subject.open();
      leaf.allocate(bytes);
    }
    const std::string endpoint = hub.context->listen("127.0.0.1", 0);
    for (std::size_t i = 0; i < leaf_count; ++i) {
      together([&] { leaves[i].peer = leaves[i].context->connect(endpoint, soon()); },
               [&] { peers.push_back(hub.context->accept(soon())); });
      leaves[i].peer->import_keys(hub.context->export_keys(hub.regions));
      peers[i]->import_keys(leaves[i].context->export_keys(leaves[i].regions));
      PlanPieces mine = pieces;
      std::ranges::fill(mine.local_regions, static_cast<std::uint32_t>(i));
      together([&] { hubs[i] = hub.prepare_with(*peers[i], mine); },
               [&] { theirs[i] = leaves[i].prepare(mine.mirrored()); });
    }
    fill(Rig::extents(hub), pattern_seed);
    for (const End& leaf : leaves) poison(leaf.region.address, leaf.region.bytes);
  }
  // The events of a kind and tag, of every peer that is not `without`.
  void wait_for_all(EventKind kind, std::uint64_t tag, std::uint32_t without = UINT32_MAX) {
    for (std::size_t i = 0; i < leaf_count; ++i) {
      if (peers[i]->id() == without) continue;
      const Deadline deadline = soon();
      const auto found = [&](const Event& event) {
        return event.kind == kind && event.tag == tag && event.peer == peers[i]->id();
      };
      while (std::erase_if(hub.seen, found) == 0) {
        if (deadline.passed()) throw Failure(std::string(name_of(kind)) + " of one peer did not come");
        for (End& leaf : leaves) leaf.collect(Deadline(0));
        hub.collect(Deadline::after(1'000'000));
      }
    }
  }
  void push(std::size_t i, std::uint64_t tag) { hub.context->post(*hubs[i], Op::push, {}, tag, nullptr); }
  void arm(std::size_t i, std::uint64_t tag) { leaves[i].context->arm(*theirs[i], Op::push, {}, tag); }
  void require_moved() const {
    for (std::uint32_t i = 0; subject.can.moves_data && i < leaf_count; ++i) {
      Pieces target = Rig::at_target(pieces);
      std::ranges::fill(target.source_regions, i);
      CHECK_EQ(verify(Rig::extents(leaves[i]), target, pattern_seed, 0, 1).wrong_words, 0U);
    }
  }
};

CHECK_BACKEND(peers, several_at_once, pushes) {
  Star star(subject);
  for (std::size_t i = 0; i < Star::leaf_count; ++i) star.arm(i, 9);
  star.wait_for_all(EventKind::armed, 9);
  for (std::size_t i = 0; i < Star::leaf_count; ++i) star.push(i, 9);  // tags are a peer's own
  star.wait_for_all(EventKind::confirmed, 9);
  for (End& leaf : star.leaves) leaf.wait(EventKind::delivered, 9);
  star.require_moved();
}

CHECK_BACKEND(peers, one_that_is_lost_does_not_trouble_the_others, pushes) {
  Star star(subject);
  const std::uint32_t lost = star.peers[1]->id();
  star.leaves[1].context->close();
  star.hub.wait(EventKind::peer_lost, 0);
  CHECK(!star.peers[1]->lost().empty());
  CHECK_THROWS(Fault::peer_lost, "", star.hub.context->release(*star.peers[1], 1));
  for (const std::size_t i : {0U, 2U}) star.arm(i, 9);
  star.wait_for_all(EventKind::armed, 9, lost);
  for (const std::size_t i : {0U, 2U}) star.push(i, 9);
  star.wait_for_all(EventKind::confirmed, 9, lost);
  for (const std::size_t i : {0U, 2U}) CHECK_EQ(star.peers[i]->lost(), "");
}

}  // namespace
}  // namespace kvxfer::test
