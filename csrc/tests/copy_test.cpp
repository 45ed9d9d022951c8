// What shm and cma share: the initiator copies, in chunks, and tells.
#include <algorithm>
#include <numeric>
#include <random>

#include "memory/copy.h"
#include "tests/bare_copy.h"

namespace kvxfer::test {
namespace {

// `n` pieces of `length` bytes, scattered on both sides.
PlanPieces scattered(std::size_t n, std::uint64_t length) {
  std::vector<std::uint64_t> from(n), to(n);
  std::iota(from.begin(), from.end(), std::uint64_t{0});
  std::iota(to.begin(), to.end(), std::uint64_t{0});
  std::mt19937 random(5);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  PlanPieces pieces;
  for (std::size_t i = 0; i < n; ++i) pieces.add(from[i] * length, to[i] * length, length);
  return pieces;
}

TEST(copy, small_requests_and_large_ones_by_one_thread_and_by_many) {
  for (const std::string& backend : copying_backends)
    for (const std::int64_t threads : {1, 2, 5}) {
      // Beyond the caches once: a sanitizer takes its time for so much.
      const std::uint64_t large = threads == 5 ? std::min<std::uint64_t>(cache_bytes() / 65'537 + 1, 1000) : 20;
      Pair pair(large * 65'537 + (1 << 20), {{"threads", threads}}, backend);
      for (const auto& [n, length] :
           {std::pair<std::uint64_t, std::uint64_t>{3, 7}, {1000, 333}, {1, 1'300'001}, {large, 65'537}}) {
        const PlanPieces pieces = scattered(n, length);
        const auto plans = pair.prepare(pieces);
        for (const Op op : {Op::push, Op::pull}) {
          std::memset(pair.b.region.address, 0xDB, n * length + 1);
          End& initiator = op == Op::push ? pair.a : pair.b;
          initiator.context->post(op == Op::push ? *plans.first : *plans.second, op, {}, 8, nullptr);
          initiator.wait(EventKind::confirmed, 8);
          (op == Op::push ? pair.b : pair.a).wait(EventKind::delivered, 8);
          CHECK_EQ(pair.arrived(pieces), n);
          CHECK(*pair.b.at(n * length) == std::byte{0xDB});
        }
      }
    }
}

TEST(copy, both_sides_count_the_bytes) {
  for (const std::string& backend : copying_backends) {
    Pair pair(1 << 20, {}, backend);
    const auto plans = pair.prepare(scattered(16, 4096));
    pair.a.context->post(*plans.first, Op::push, {}, 1, nullptr);
    pair.b.wait(EventKind::delivered, 1);
    CHECK_EQ(pair.a.context->bytes_moved(), 65'536U);
    CHECK_EQ(pair.b.context->bytes_moved(), 65'536U);
  }
}

TEST(copy, local_comes_before_confirmed) {
  for (const std::string& backend : copying_backends) {
    Pair pair(1 << 16, {}, backend);
    const auto plans = pair.prepare(scattered(4, 4096));
    for (std::uint64_t tag = 1; tag <= 200; ++tag) {
      pair.a.context->post(*plans.first, Op::push, {}, tag, nullptr);
      Event events[2];
      for (Event& event : events) CHECK_EQ(pair.a.context->poll({&event, 1}, soon()), 1U);
      CHECK(events[0].kind == EventKind::local && events[1].kind == EventKind::confirmed);
      CHECK(events[0].time_ns <= events[1].time_ns);
    }
  }
}

TEST(copy, as_many_pushes_in_flight_as_promised_from_both_sides) {
  for (const std::string& backend : copying_backends) {
    Pair pair(1 << 20, {}, backend);
    const std::uint32_t most = pair.a.context->capabilities().max_inflight;
    // Places of its own for each, or two threads would write the same bytes at once.
    std::vector<std::shared_ptr<Plan>> of_a, of_b;
    for (std::uint64_t i = 0; i < 2 * most; ++i) {
      PlanPieces piece;
      piece.add(i * 1024, i * 1024, 1000);
      auto [as_a, as_b] = pair.prepare(piece);
      (i % 2 == 0 ? of_a : of_b).push_back(i % 2 == 0 ? as_a : as_b);
    }
    for (int round = 0; round < 5; ++round) {
      ReadyFlag ready{0};
      for (std::uint64_t tag = 0; tag < most; ++tag) {
        pair.a.context->post(*of_a[tag], Op::push, {}, tag, &ready);
        pair.b.context->post(*of_b[tag], Op::push, {}, tag, &ready);
      }
      CHECK_THROWS(Fault::unavailable, "256 transfers are open",
                   pair.a.context->post(*of_a[0], Op::push, {}, most, nullptr));
      ready = 1;
      for (std::uint64_t tag = 0; tag < most; ++tag)
        for (End* side : {&pair.a, &pair.b}) {
          side->wait(EventKind::confirmed, tag);
          side->wait(EventKind::delivered, tag);
        }
      for (End* side : {&pair.a, &pair.b}) side->drain(0);
    }
  }
}

TEST(copy, a_slow_push_tells_the_other_side_how_far_it_is) {
  // One system call for each piece: this takes a good deal longer than the time between two words about it.
  constexpr std::uint64_t length = 50;
  constexpr std::size_t n = 400'000;
  BareCopy bare("cma", n * length, {{"threads", 1}, {"pieces_per_call", 1}});
  const PlanPieces pieces = scattered(n, length);
  std::vector<char> ours(sizeof(Notice) + n * sizeof(WireDescriptor));
  together([&] { CHECK_EQ(receive_all(bare.lanes[0].fd(), ours.data(), ours.size()), 0); },
           [&] { bare.prepare(pieces); });
  bare.end.context->post(*bare.plan, Op::push, {}, 6, nullptr);
  std::uint64_t told = 0, words = 0;
  for (Notice notice;; ++words) {
    notice = bare.hear();
    told += notice.count;
    CHECK_EQ(notice.tag, 6U);
    CHECK_EQ(notice.total, n * length);
    if (notice.kind == NoticeKind::written) break;
    CHECK(notice.kind == NoticeKind::progress && notice.count > 0 && told < n * length);
  }
  CHECK_EQ(told, n * length);
  CHECK(words >= 1);
}

TEST(copy, is_told_how_far_the_other_side_is) {
  for (const std::string& backend : copying_backends) {
    BareCopy bare(backend);
    bare.prepare();
    say(bare.lanes[0], make_notice(NoticeKind::progress, Op::push, 2, 1000, 5000));
    say(bare.lanes[0], make_notice(NoticeKind::written, Op::push, 2, 4000, 5000));
    bare.end.wait(EventKind::delivered, 2);
    CHECK_EQ(bare.end.context->bytes_moved(), 5000U);
    const Notice answer = bare.hear();
    CHECK(answer.kind == NoticeKind::confirm && answer.tag == 2);
  }
}

TEST(copy, words_that_make_no_sense_lose_the_peer) {
  const auto lost = [](const Notice& notice, const std::string& why) {
    for (const std::string& backend : copying_backends) {
      BareCopy bare(backend);
      bare.prepare();
      bare.end.context->post(*bare.plan, Op::push, {}, 3, &bare.never);
      say(bare.lanes[0], notice);
      bare.check_lost("protocol error: " + why);
      bare.end.wait(EventKind::error, 3);
    }
  };
  const std::uint64_t all = 1 << 16;
  Notice wrong = make_notice(NoticeKind::written, Op::push, 1, 5, 5);
  wrong.plan = 1;
  lost(wrong, "bytes copied that no plan has");
  lost(make_notice(NoticeKind::written, Op::push, 1, 5, all + 1), "bytes copied that no plan has");
  lost(make_notice(NoticeKind::written, Op::push, 1, 6, 5), "bytes copied that no plan has");
  lost(make_notice(NoticeKind::written, Op::pull, 1, 5, 5), "bytes copied that no plan has");
  lost(make_notice(NoticeKind::delivered, Op::push, 1, 5, 5), "bytes copied that no plan has");
  lost(make_notice(NoticeKind::progress, Op::pull, 1, UINT64_MAX, 5), "bytes copied that no plan has");
  lost(make_notice(NoticeKind::confirm, Op::push, 3), "bytes confirmed that were not written");
  lost(make_notice(NoticeKind::confirm, Op::push, 4), "bytes confirmed that were not written");
  lost(make_notice(NoticeKind::request, Op::pull, 1), "unknown notice");
  lost(make_notice(static_cast<NoticeKind>(99), Op::push, 1), "unknown notice");
}

TEST(copy, a_peer_that_dies_in_the_middle_ends_what_is_open) {
  for (const std::string& backend : copying_backends)
    for (const Op op : {Op::push, Op::pull}) {
      BareCopy bare(backend, 64 << 20);
      bare.prepare();
      bare.end.context->post(*bare.plan, op, {}, 1, nullptr);
      if (op == Op::push) bare.end.context->post(*bare.plan, op, {}, 2, &bare.never);
      while (bare.end.context->bytes_moved() == 0) std::this_thread::yield();
      bare.lanes.clear();
      bare.end.wait(EventKind::peer_lost, 0);
      std::vector<Event> events;  // the first ends when no thread copies any more of it, which may be after that
      const auto ends = [&] { return count(events, EventKind::error, 1) + count(events, EventKind::confirmed, 1); };
      for (const Deadline deadline = soon(); ends() == 0 && !deadline.passed();)
        for (const Event& event : bare.end.drain(5'000'000)) events.push_back(event);
      CHECK_EQ(ends(), 1U);
      if (op == Op::push) CHECK_EQ(count(events, EventKind::error, 2), 1U);
      CHECK_THROWS(Fault::peer_lost, "the peer was lost", bare.end.context->post(*bare.plan, op, {}, 3, nullptr));
    }
}

TEST(copy, the_backends_of_hosts_and_networks_do_not_meet) {
  const auto tcp = find_backend("tcp").open(token, {});
  const std::string endpoint = tcp->listen("127.0.0.1", 0);
  for (const std::string& backend : copying_backends) {
    const auto context = find_backend(backend).open(token, {});
    CHECK_THROWS(Fault::usage, "not an endpoint of this backend", context->connect(endpoint, soon()));
    CHECK_THROWS(Fault::usage, "not an endpoint of this backend",
                 tcp->connect(context->listen("127.0.0.1", 0), soon()));
  }
}

}  // namespace
}  // namespace kvxfer::test
