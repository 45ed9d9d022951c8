#include <sched.h>

#include <filesystem>
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

// What holds for every backend is checked by the conformance suite; this is what tcp alone has.

// A push by `a`, or a pull by `b`: the same bytes go the same way.
void move(Pair& pair, const Plans& plans, Op op, std::uint64_t tag) {
  const bool push = op == Op::push;
  End& initiator = push ? pair.a : pair.b;
  initiator.context->post(*(push ? plans.first : plans.second), op, {}, tag, nullptr);
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
      const PlanPieces pieces = shuffled(n, length, 1 + n / 3);
      const auto plans = pair.prepare(pieces);
      for (const Op op : {Op::push, Op::pull}) {
        clear(pair);
        move(pair, plans, op, 40);
        CHECK_EQ(pair.arrived(pieces), n);
      }
    }
  }
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
  const auto plans = pair.prepare(shuffled(256, 4096, 1));
  move(pair, plans, Op::push, 1);
  move(pair, plans, Op::pull, 2);
  if (std::thread::hardware_concurrency() == 1) return;  // every thread is pinned then
  const Deadline deadline = Deadline::after(10'000'000'000);
  while (pinned_threads() != before + 12 && !deadline.passed()) std::this_thread::yield();
  CHECK_EQ(pinned_threads(), before + 12);
}

TEST(tcp, bytes_moved_counts_both_directions) {
  Pair pair(1 << 20);
  const auto plans = pair.prepare(shuffled(16, 4096, 4));
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
