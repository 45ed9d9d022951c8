// What happens when a transfer does not run to its end, as far as it is tcp's own (the rest: tests/conformance).
#include <thread>

#include "backend/lane.h"
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

bool ended(const std::vector<Event>& events, std::uint64_t tag) {
  return count(events, EventKind::confirmed, tag) + count(events, EventKind::delivered, tag) +
             count(events, EventKind::cancelled, tag) + count(events, EventKind::error, tag) ==
         1;
}

// Cancelled at every point of its way: both sides tell the same single end, and the tag is free again.
void cancel_anywhere(Op op, bool zero_copy) {
  Pair pair(8 << 20, {{"chunk_kib", 64}, {"zerocopy", zero_copy ? 1 : 0}});
  const auto plans = pair.prepare(one_piece(8 << 20));
  End& initiator = op == Op::push ? pair.a : pair.b;
  End& passive = op == Op::push ? pair.b : pair.a;
  const auto& plan = op == Op::push ? plans.first : plans.second;
  std::size_t cancelled = 0;
  for (int round = 0; round < 60 || (cancelled == 0 && round < 1000); ++round) {  // a busy machine is late often
    initiator.context->post(*plan, op, {}, 5, nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 60)));
    initiator.context->cancel(*initiator.peer, 5);
    initiator.context->cancel(*initiator.peer, 5);
    std::vector<Event> mine, theirs;
    const Deadline deadline = soon();
    const auto collect = [&](End& side, std::vector<Event>& into) {
      while (!ended(into, 5) && !deadline.passed()) {
        const std::vector<Event> more = side.drain(1'000'000);
        into.insert(into.end(), more.begin(), more.end());
      }
    };
    collect(initiator, mine);
    collect(passive, theirs);
    CHECK(ended(mine, 5) && ended(theirs, 5));
    CHECK_EQ(count(mine, EventKind::cancelled, 5), count(theirs, EventKind::cancelled, 5));
    cancelled += count(mine, EventKind::cancelled, 5);
  }
  CHECK(cancelled > 0);
  initiator.context->post(*plan, op, {}, 5, nullptr);
  initiator.wait(EventKind::confirmed, 5);
  CHECK_EQ(pair.arrived(one_piece(8 << 20)), 1U);
}

TEST(tcp_cancel, a_push_anywhere_on_its_way) { cancel_anywhere(Op::push, false); }
TEST(tcp_cancel, a_pull_anywhere_on_its_way) { cancel_anywhere(Op::pull, false); }
TEST(tcp_cancel, a_push_anywhere_on_its_way_that_is_not_copied) { cancel_anywhere(Op::push, true); }
TEST(tcp_cancel, a_pull_anywhere_on_its_way_that_is_not_copied) { cancel_anywhere(Op::pull, true); }

TEST(tcp_lost, open_transfers_end_with_errors_on_both_sides) {
  Pair pair(1 << 16);
  const auto plans = pair.prepare(one_piece(1 << 16));
  ReadyFlag never{0};
  for (std::uint64_t tag = 1; tag <= 3; ++tag) pair.a.context->post(*plans.first, Op::push, {}, tag, &never);
  pair.b.context->close();
  for (std::uint64_t tag = 1; tag <= 3; ++tag) pair.a.wait(EventKind::error, tag);
  pair.a.wait(EventKind::peer_lost, 0);
  CHECK_EQ(pair.a.peer->lost(), "the peer closed the connection");
  CHECK_EQ(pair.b.peer->lost(), "this side closed the connection");
  CHECK_THROWS(Fault::peer_lost, "the peer was lost: the peer closed the connection",
               pair.a.context->post(*plans.first, Op::push, {}, 4, nullptr));
  CHECK_THROWS(Fault::peer_lost, "the peer was lost", pair.a.context->arm(*plans.first, Op::pull, {}, 4));
  CHECK_THROWS(Fault::peer_lost, "the peer was lost", pair.a.context->release(*pair.a.peer, 4));
  CHECK_THROWS(Fault::peer_lost, "the peer was lost", pair.a.prepare(one_piece(8)));
  CHECK(!pair.a.context->cancel(*pair.a.peer, 1));
  CHECK_EQ(pair.a.drain(5'000'000).size(), 0U);
}

TEST(tcp_lost, an_event_queue_that_nobody_empties_loses_the_peer_but_not_the_news) {
  Pair pair(4096);
  const auto plans = pair.prepare(one_piece(64));
  ReadyFlag never{0};
  pair.a.context->post(*plans.first, Op::push, {}, 77, &never);
  try {
    for (std::uint64_t tag = 0; tag < 20'000; ++tag) pair.b.context->arm(*plans.second, Op::push, {}, tag);
  } catch (const Error&) {  // the flood was cut off
  }
  pair.b.wait(EventKind::peer_lost, 0);
  const std::vector<Event> events = pair.a.drain(50'000'000);
  CHECK_EQ(events.size(), 8192U + 2);  // all that there was room for, and the ends of the transfer and of the peer
  CHECK_EQ(count(events, EventKind::error, 77), 1U);
  CHECK_EQ(count(events, EventKind::peer_lost, 0), 1U);
  CHECK(pair.a.peer->lost().find("pile up") != std::string::npos);
}

TEST(tcp_close, frees_the_port) {
  const auto first = find_backend("tcp").open(token, {});
  const std::string endpoint = first->listen("127.0.0.1", 0);
  const auto port = static_cast<std::uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1)));
  const auto second_context = find_backend("tcp").open(token, {});
  CHECK_THROWS(Fault::unavailable, "in use", second_context->listen("127.0.0.1", port));
  first->close();
  second_context->listen("127.0.0.1", port);
}

TEST(tcp_close, does_not_wait_for_a_peer_that_reads_nothing) {
  // The other end is lanes without anyone behind them.
  const auto context = find_backend("tcp").open(token, {});
  const Region region = context->allocate(32 << 20, MemoryKind::host, -1);
  LaneListener listener("127.0.0.1", 0, token);
  std::vector<Socket> lanes;
  std::shared_ptr<Peer> peer;
  together([&] { peer = context->connect(listener.endpoint(), soon()); }, [&] { lanes = listener.accept(soon()); });
  peer->import_keys(context->export_keys({&region, 1}));
  // 24 bytes a descriptor: more than the socket takes, so prepare() is stuck in sending.
  const std::vector<std::uint32_t> zeros(1 << 20, 0), start{0};
  const std::vector<std::uint64_t> offsets(1 << 20, 0), lengths(1 << 20, 1);
  Nanoseconds closing = 0;
  together(
      [&] {
        CHECK_THROWS(Fault::peer_lost, "",
                     context->prepare(*peer, {zeros, offsets, zeros, offsets, lengths, start}, soon()));
      },
      [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        const Nanoseconds began = now_ns();
        context->close();
        closing = now_ns() - began;
      });
  CHECK(closing < 3 * second);
}

}  // namespace
}  // namespace kvxfer::test
