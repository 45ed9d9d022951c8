#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <filesystem>
#include <thread>

#include "backend/lane.h"
#include "memory/parallel.h"
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
  for (const Options& options : {Options{}, Options{{"connections", 1}}, Options{{"connections", 5}, {"chunk_kib", 4}},
                                 Options{{"chunk_kib", 4}, {"pieces_per_call", 1}}, Options{{"pieces_per_call", 1023}},
                                 Options{{"connections", 3}, {"chunk_kib", 4}, {"zerocopy", 1}}}) {
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

// Both sides of a pair have two threads for each connection.
void expect_pinned(std::size_t expected) {
  const Deadline deadline = Deadline::after(10'000'000'000);
  while (pinned_threads() != expected && !deadline.passed()) std::this_thread::yield();
  CHECK_EQ(pinned_threads(), expected);
}

TEST(tcp, pinned_lanes_move_bytes_and_keep_to_their_cpus) {
  if (usable_cores() == 1) return;  // every thread is pinned then
  const std::size_t before = pinned_threads();
  Pair pair(1 << 20, {{"connections", 3}, {"pin", 1}});
  const auto plans = pair.prepare(shuffled(256, 4096, 1));
  move(pair, plans, Op::push, 1);
  move(pair, plans, Op::pull, 2);
  expect_pinned(before + 12);
}

TEST(tcp, lanes_are_pinned_where_there_are_no_more_cpus_than_connections) {
  const std::size_t cores = usable_cores(), before = pinned_threads();
  if (cores == 1 || cores > 63) return;
  for (const std::size_t connections : {cores, cores - 1}) {
    Pair pair(1 << 20, {{"connections", static_cast<std::int64_t>(connections)}});
    const auto plans = pair.prepare(shuffled(256, 4096, 1));
    move(pair, plans, Op::push, 1);
    expect_pinned(before + (connections == cores ? 4 * connections : 0));
  }
}

// TCP sockets of this process that have an option set to a value.
std::size_t sockets_with(int level, int option, int wanted) {
  std::size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int value = 0;
    socklen_t length = sizeof value;
    if (::getsockopt(std::stoi(entry.path().filename()), level, option, &value, &length) == 0) found += value == wanted;
  }
  return found;
}

std::size_t sockets_under(const std::string& congestion_control) {
  std::size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::array<char, 16> name{};
    socklen_t length = name.size() - 1;
    if (::getsockopt(std::stoi(entry.path().filename()), IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) == 0)
      found += congestion_control == name.data();
  }
  return found;
}

TEST(tcp, within_a_host_data_sockets_of_both_sides_leave_the_systems_congestion_control) {
  const std::size_t before = sockets_under("reno");
  const Pair with(1 << 20, {{"connections", 3}});
  const std::size_t with_it = sockets_under("reno");
  const Pair without(1 << 20, {{"connections", 3}, {"reno_on_lo", 0}});
  const std::size_t system_has_it = sockets_under("reno") - with_it;  // where reno is the system's
  CHECK_EQ(with_it - before, system_has_it > 0 ? system_has_it : 6U);
}

TEST(tcp, data_sockets_poll_the_network_card_where_the_kernel_lets_them) {
  constexpr int wanted = 77;
  const Options options{{"busy_poll_us", wanted}};
  const Socket tried(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::setsockopt(tried.fd(), SOL_SOCKET, SO_BUSY_POLL, &wanted, sizeof wanted) != 0) {
    CHECK_THROWS(Fault::unavailable, "busy_poll_us=77", find_backend("tcp").open(Token(token_bytes, 'x'), options));
    return;
  }
  Pair pair(1 << 20, options);
  const auto plans = pair.prepare(shuffled(256, 4096, 1));
  move(pair, plans, Op::push, 1);
  CHECK_EQ(sockets_with(SOL_SOCKET, SO_BUSY_POLL, wanted), 4U + 1U);
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
