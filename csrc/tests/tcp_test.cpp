#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include "tests/pair.h"

namespace kvxfer::test {
namespace {

// `n` pieces of `length` bytes, scattered on both sides, in segments of `per_segment`.
PlanPieces scattered(std::size_t n, std::uint64_t length, std::size_t per_segment) {
  std::vector<std::uint64_t> from(n), to(n);
  std::iota(from.begin(), from.end(), std::uint64_t{0});
  std::iota(to.begin(), to.end(), std::uint64_t{0});
  std::mt19937 random(3);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  PlanPieces pieces;
  pieces.segments.clear();
  for (std::size_t i = 0; i < n; ++i) {
    if (i % per_segment == 0) pieces.segments.push_back(static_cast<std::uint32_t>(i));
    pieces.add(from[i] * length, to[i] * length, length);
  }
  return pieces;
}

// A push by `a`, or a pull by `b`: the same bytes go the same way.
void move(Pair& pair, const std::pair<std::shared_ptr<Plan>, std::shared_ptr<Plan>>& plans, Op op, std::uint64_t tag,
          const std::vector<std::uint32_t>& segments = {}) {
  const bool push = op == Op::push;
  End& initiator = push ? pair.a : pair.b;
  initiator.context->post(*(push ? plans.first : plans.second), op, segments, tag, nullptr);
  initiator.wait(EventKind::confirmed, tag);
  (push ? pair.b : pair.a).wait(EventKind::delivered, tag);
}

void clear(Pair& pair) { std::memset(pair.b.region.address, 0xDB, pair.b.region.bytes); }

TEST(tcp, push_and_pull_with_every_kind_of_cut) {
  for (const Options& options :
       {Options{}, Options{{"connections", 1}}, Options{{"connections", 5}, {"chunk_kib", 4}},
        Options{{"chunk_kib", 4}, {"pieces_per_call", 1}}, Options{{"pieces_per_call", 1023}}}) {
    Pair pair(1 << 20, options);
    for (const auto& [n, length] :
         {std::pair<std::size_t, std::uint64_t>{1, 1}, {3, 7}, {100, 4099}, {1, 1 << 20}, {777, 1000}}) {
      const PlanPieces pieces = scattered(n, length, 1 + n / 3);
      const auto plans = pair.prepare(pieces);
      for (const Op op : {Op::push, Op::pull}) {
        clear(pair);
        move(pair, plans, op, 40);
        CHECK_EQ(pair.arrived(pieces), n);
      }
    }
  }
}

TEST(tcp, ten_thousand_small_pieces) {
  Pair pair(1 << 20);
  const PlanPieces pieces = scattered(10'000, 100, 1000);
  const auto plans = pair.prepare(pieces);
  for (const Op op : {Op::push, Op::pull}) {
    clear(pair);
    move(pair, plans, op, 1);
    CHECK_EQ(pair.arrived(pieces), 10'000U);
    CHECK(std::count(pair.b.at(0), pair.b.at(1 << 20), std::byte{0xDB}) >= (1 << 20) - 1'000'000);
  }
}

TEST(tcp, nothing_at_all_is_confirmed_too) {
  Pair pair(4096);
  PlanPieces empty_piece;
  empty_piece.add(0, 0, 0);
  for (const PlanPieces& pieces : {PlanPieces{}, empty_piece}) {
    const auto plans = pair.prepare(pieces);
    CHECK_EQ(plans.first->bytes(), 0U);
    move(pair, plans, Op::push, 1);
    move(pair, plans, Op::pull, 1);
  }
}

TEST(tcp, empty_segments_between_others_do_not_linger) {
  Pair pair(1 << 16, {{"chunk_kib", 4}});
  PlanPieces pieces;
  pieces.segments = {0, 1, 2, 3};
  pieces.add(0, 0, 20'000);
  pieces.add(20'000, 20'000, 0);
  pieces.add(20'000, 30'000, 100);
  pieces.add(20'000, 40'000, 0);
  const auto plans = pair.prepare(pieces);
  for (int round = 0; round < 400; ++round)  // more than there are open transfers to leak
    for (const Op op : {Op::push, Op::pull}) move(pair, plans, op, 1, {0, 3, 2, 1});
  CHECK_EQ(pair.arrived(pieces), 4U);
}

TEST(tcp, segments_in_any_order_move_their_pieces_and_no_others) {
  Pair pair(1 << 20);
  const PlanPieces pieces = scattered(64, 4096, 8);
  const auto plans = pair.prepare(pieces);
  CHECK_EQ(plans.first->segments(), 8U);
  for (const Op op : {Op::push, Op::pull}) {
    clear(pair);
    move(pair, plans, op, 1, {6, 2});
    CHECK_EQ(pair.arrived(pieces), 16U);
    for (const std::size_t i : {16U, 23U, 48U, 55U})
      CHECK(std::memcmp(pair.a.at(pieces.local[i]), pair.b.at(pieces.remote[i]), 4096) == 0);
    for (const std::uint32_t segment : {7U, 0U, 1U, 3U, 5U, 4U}) move(pair, plans, op, 2 + segment, {segment});
    CHECK_EQ(pair.arrived(pieces), 64U);
  }
}

TEST(tcp, unknown_segments_and_ready_flags_of_pulls_are_refused) {
  Pair pair(1 << 16);
  const auto plans = pair.prepare(scattered(4, 64, 2));
  const std::vector<std::uint32_t> unknown{0, 2};
  CHECK_THROWS(Fault::usage, "segment 2 of a plan with 2",
               pair.a.context->post(*plans.first, Op::push, unknown, 1, nullptr));
  CHECK_THROWS(Fault::usage, "segment 2", pair.b.context->post(*plans.second, Op::pull, unknown, 1, nullptr));
  const ReadyFlag ready{1};
  CHECK_THROWS(Fault::usage, "takes no ready flag", pair.b.context->post(*plans.second, Op::pull, {}, 1, &ready));
  move(pair, plans, Op::push, 1);  // the refused tag is free
}

TEST(tcp, a_push_waits_for_its_ready_flag_and_holds_up_no_other) {
  Pair pair(1 << 20);
  const PlanPieces pieces = scattered(16, 4096, 4);
  const auto plans = pair.prepare(pieces);
  ReadyFlag ready{0};
  const std::vector<std::uint32_t> first{0}, second{1};
  pair.a.context->post(*plans.first, Op::push, first, 1, &ready);
  pair.a.context->post(*plans.first, Op::push, second, 2, nullptr);
  pair.a.wait(EventKind::confirmed, 2);
  CHECK_EQ(count(pair.a.drain(30'000'000), EventKind::confirmed, 1), 0U);
  CHECK_EQ(pair.arrived(pieces), 4U);
  ready = 1;
  pair.a.wait(EventKind::confirmed, 1);
  CHECK_EQ(pair.arrived(pieces), 8U);
}

TEST(tcp, tags_are_used_again_and_refused_while_open) {
  Pair pair(1 << 20);
  const PlanPieces pieces = scattered(16, 4096, 4);
  const auto plans = pair.prepare(pieces);
  for (int round = 0; round < 1000; ++round) move(pair, plans, round % 2 == 0 ? Op::push : Op::pull, 7);
  ReadyFlag ready{0};
  pair.a.context->post(*plans.first, Op::push, {}, 7, &ready);
  CHECK_THROWS(Fault::usage, "tag 7 is open already", pair.a.context->post(*plans.first, Op::push, {}, 7, nullptr));
  ready = 1;
  pair.a.wait(EventKind::confirmed, 7);
}

TEST(tcp, sixteen_in_flight_both_ways_at_once) {
  Pair pair(1 << 20);
  const PlanPieces pieces = scattered(64, 4096, 4);
  const auto plans = pair.prepare(pieces);
  for (int round = 0; round < 20; ++round) {
    clear(pair);
    for (std::uint32_t s = 0; s < 16; ++s) {
      const std::vector<std::uint32_t> segment{s};
      End& initiator = s % 2 == 0 ? pair.a : pair.b;
      initiator.context->post(s % 2 == 0 ? *plans.first : *plans.second, s % 2 == 0 ? Op::push : Op::pull, segment, s,
                              nullptr);
    }
    for (std::uint32_t s = 0; s < 16; ++s) (s % 2 == 0 ? pair.a : pair.b).wait(EventKind::confirmed, s);
    for (std::uint32_t s = 0; s < 16; ++s) (s % 2 == 0 ? pair.b : pair.a).wait(EventKind::delivered, s);
    CHECK_EQ(pair.arrived(pieces), 64U);
  }
}

TEST(tcp, as_many_in_flight_as_promised_from_both_sides) {
  Pair pair(1 << 20, {{"chunk_kib", 4}});
  const std::uint32_t most = pair.a.context->capabilities().max_inflight;
  const PlanPieces pieces = scattered(2 * most, 2000, 1);  // a segment for each transfer
  const auto plans = pair.prepare(pieces);
  for (int round = 0; round < 3; ++round) {
    clear(pair);
    ReadyFlag ready{0};
    for (std::uint32_t tag = 0; tag < most; ++tag) {
      const std::vector<std::uint32_t> push{2 * tag}, pull{2 * tag + 1};
      pair.a.context->post(*plans.first, Op::push, push, tag, &ready);
      pair.b.context->post(*plans.second, Op::pull, pull, tag, nullptr);
    }
    CHECK_THROWS(Fault::unavailable, "256 transfers are open",
                 pair.a.context->post(*plans.first, Op::push, {}, most, nullptr));
    ready = 1;
    for (std::uint64_t tag = 0; tag < most; ++tag) {
      pair.a.wait(EventKind::confirmed, tag);
      pair.a.wait(EventKind::delivered, tag);
      pair.b.wait(EventKind::confirmed, tag);
      pair.b.wait(EventKind::delivered, tag);
    }
    CHECK_EQ(pair.arrived(pieces), pieces.lengths.size());
    pair.a.drain(0);  // local
  }
}

TEST(tcp, arm_and_release_are_told_to_the_other_side) {
  Pair pair(4096);
  const auto plans = pair.prepare(scattered(1, 64, 1));
  pair.b.context->arm(*plans.second, Op::push, {}, 3);
  CHECK_EQ(pair.a.wait(EventKind::armed, 3).peer, pair.a.peer->id());
  move(pair, plans, Op::push, 3);
  pair.b.context->release(*pair.b.peer, 3);
  const Event released = pair.a.wait(EventKind::released, 3);
  CHECK(released.time_ns <= now_ns());
  CHECK_EQ(count(pair.a.drain(10'000'000), EventKind::released, 3), 0U);
}

TEST(tcp, local_says_that_the_source_was_read) {
  Pair pair(1 << 20);
  const auto plans = pair.prepare(scattered(16, 4096, 4));
  std::size_t told = 0;
  for (int round = 0; round < 50; ++round) {
    pair.a.context->post(*plans.first, Op::push, {}, 1, nullptr);
    pair.a.wait(EventKind::confirmed, 1);
    pair.b.wait(EventKind::delivered, 1);
    told += count(pair.a.drain(1'000'000), EventKind::local, 1);
  }
  CHECK(told <= 50);
}

// Threads of this process that may run on one CPU only.
std::size_t pinned_threads() {
  std::size_t pinned = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    cpu_set_t allowed;
    if (::sched_getaffinity(std::stoi(task.path().filename()), sizeof allowed, &allowed) == 0)
      pinned += CPU_COUNT(&allowed) == 1 ? 1 : 0;
  }
  return pinned;
}

TEST(tcp, pinned_lanes_move_bytes_and_keep_to_their_cpus) {
  const std::size_t before = pinned_threads();
  Pair pair(1 << 20, {{"connections", 3}, {"pin", 1}});
  const auto plans = pair.prepare(scattered(256, 4096, 1));
  move(pair, plans, Op::push, 1);
  move(pair, plans, Op::pull, 2);
  if (std::thread::hardware_concurrency() == 1) return;  // every thread is pinned then
  const Deadline deadline = Deadline::after(10'000'000'000);
  while (pinned_threads() != before + 12 && !deadline.passed()) std::this_thread::yield();
  CHECK_EQ(pinned_threads(), before + 12);
}

TEST(tcp, several_peers_of_one_context) {
  constexpr std::size_t clients = 3;
  const PlanPieces pieces = scattered(32, 1024, 32);
  const auto hub = find_backend("tcp").open(token, {});
  const Region region = hub->allocate(1 << 16, MemoryKind::host, -1);
  for (std::uint64_t i = 0; i < region.bytes; ++i) region.address[i] = static_cast<std::byte>(i * 31 + i / 256);
  const std::string endpoint = hub->listen("127.0.0.1", 0);
  std::vector<End> leaves(clients);
  std::vector<std::shared_ptr<Peer>> peers;
  {
    std::vector<std::jthread> threads;
    for (End& leaf : leaves)
      threads.emplace_back([&] {
        leaf.context = find_backend("tcp").open(token, {});
        leaf.allocate(1 << 16);
        leaf.peer = leaf.context->connect(endpoint, soon());
        leaf.peer->import_keys(hub->export_keys({&region, 1}));
      });
    for (std::size_t i = 0; i < clients; ++i) peers.push_back(hub->accept(soon()));
  }
  // All leaves prepare at once, so it does not matter which of the hub's peers each is.
  std::vector<std::shared_ptr<Plan>> hubs(clients), theirs(clients);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < clients; ++i)
      threads.emplace_back([&, i] { theirs[i] = leaves[i].prepare(pieces.mirrored()); });
    End side;
    for (std::size_t i = 0; i < clients; ++i) {
      peers[i]->import_keys(leaves[i].context->export_keys({&leaves[i].region, 1}));
      const std::vector<std::uint32_t> zeros(pieces.lengths.size(), 0);
      hubs[i] =
          hub->prepare(*peers[i], {zeros, pieces.local, zeros, pieces.remote, pieces.lengths, pieces.segments}, soon());
    }
  }
  for (std::size_t i = 0; i < clients; ++i) hub->post(*hubs[i], Op::push, {}, 9, nullptr);  // tags are the peers' own
  std::size_t confirmed = 0;
  Event event;
  while (confirmed < clients && hub->poll({&event, 1}, soon()) == 1)
    if (event.kind == EventKind::confirmed) ++confirmed;
  CHECK_EQ(confirmed, clients);
  for (End& leaf : leaves) {
    leaf.wait(EventKind::delivered, 9);
    for (std::size_t i = 0; i < pieces.lengths.size(); ++i)
      CHECK(std::memcmp(region.address + pieces.local[i], leaf.at(pieces.remote[i]), pieces.lengths[i]) == 0);
  }
  leaves[0].context->close();
  CHECK(hub->poll({&event, 1}, soon()) == 1);
  CHECK(event.kind == EventKind::peer_lost);
  const auto lost = static_cast<std::size_t>(event.peer);
  for (std::size_t i = 0; i < clients; ++i)
    if (i != lost) hub->post(*hubs[i], Op::push, {}, 10, nullptr);
  confirmed = 0;
  while (confirmed < clients - 1 && hub->poll({&event, 1}, soon()) == 1)
    if (event.kind == EventKind::confirmed) ++confirmed;
  CHECK_EQ(confirmed, clients - 1);
}

TEST(tcp, plans_and_peers_of_another_context_are_refused) {
  Pair one(4096), other(4096);
  const auto plans = one.prepare(scattered(1, 64, 1));
  CHECK_THROWS(Fault::usage, "another context", other.a.context->post(*plans.first, Op::push, {}, 1, nullptr));
  CHECK_THROWS(Fault::usage, "another context", other.a.context->release(*one.a.peer, 1));
  CHECK_THROWS(Fault::usage, "another context", other.a.prepare_with(*one.a.peer, scattered(1, 64, 1)));
}

TEST(tcp, bytes_moved_counts_both_directions) {
  Pair pair(1 << 20);
  const auto plans = pair.prepare(scattered(16, 4096, 4));
  move(pair, plans, Op::push, 1);
  // A sender counts what a system call has taken once it is back; the confirmation may be quicker.
  for (const Deadline deadline = soon(); pair.a.context->bytes_moved() < 65'536 && !deadline.passed();)
    std::this_thread::yield();
  CHECK_EQ(pair.a.context->bytes_moved(), 65'536U);
  CHECK_EQ(pair.b.context->bytes_moved(), 65'536U);
  CHECK_EQ(pair.a.peer->describe().size(), 2U);
  CHECK_EQ(pair.a.peer->describe()[0], "tcp/lo");
}

}  // namespace
}  // namespace kvxfer::test
