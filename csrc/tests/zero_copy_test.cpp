// tcp with zerocopy=1, as far as the conformance suite, which runs over it too, does not see it.
#include "backends/tcp/zero_copy.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <thread>

#include "backends/tcp/peer.h"
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

const Options on{{"zerocopy", 1}, {"connections", 1}};

TEST(zero_copy, calls_that_are_done_in_any_order_and_around_the_end_of_their_numbers) {
  tcp::Progress progress;
  CHECK(progress.all_below(0) && !progress.all_below(1));
  progress.add({2, 3});
  progress.add({5, 5});
  CHECK(!progress.all_below(1));
  progress.add({0, 1});
  CHECK(progress.all_below(4) && !progress.all_below(5));
  progress.add({4, 4});
  CHECK(progress.all_below(6) && !progress.all_below(7));
  progress.add({6, UINT32_MAX - 1});
  progress.add({0, 9});
  CHECK(progress.all_below(UINT32_MAX) && !progress.all_below(0));
  progress.add({UINT32_MAX, UINT32_MAX});
  CHECK(progress.all_below(10) && !progress.all_below(11));
}

// A peer whose other end is bare sockets, and one plan of `bytes`.
struct Bare {
  End end;
  LaneListener listener{"127.0.0.1", 0, token};
  std::vector<Socket> lanes;
  std::shared_ptr<Plan> plan;

  explicit Bare(std::uint64_t bytes) {
    end.context = find_backend("tcp").open(token, on);
    end.allocate(bytes);
    together([&] { end.peer = end.context->connect(listener.endpoint(), soon()); },
             [&] { lanes = listener.accept(soon()); });
    const int little = 64 << 10;
    ::setsockopt(lanes[1].fd(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
    end.peer->import_keys(end.context->export_keys({&end.region, 1}));
    const WireDescriptor all{0, 0, 0, bytes};
    Notice notice;
    notice.kind = NoticeKind::prepare;
    notice.count = 1;
    notice.payload_bytes = sizeof all;
    CHECK_EQ(send_all(lanes[0].fd(), &notice, sizeof notice), 0);
    CHECK_EQ(send_all(lanes[0].fd(), &all, sizeof all), 0);
    PlanPieces pieces;
    pieces.add(0, 0, bytes);
    plan = end.prepare(pieces);
  }
  // Until the kernel has taken everything.
  void await_taken(std::uint64_t bytes) const {
    for (const Deadline deadline = soon(); end.context->bytes_moved() < bytes && !deadline.passed();)
      std::this_thread::yield();
    CHECK_EQ(end.context->bytes_moved(), bytes);
  }
};

TEST(zero_copy, the_source_counts_as_read_when_the_kernel_says_so_and_no_earlier) {
  constexpr std::uint64_t bytes = 512 << 10;
  Bare bare(bytes);
  std::memset(bare.end.region.address, 1, bytes);
  bare.end.context->post(*bare.plan, Op::push, {}, 7, nullptr);
  bare.await_taken(bytes);  // a sender that copies would be done
  CHECK_EQ(count(bare.end.drain(200'000'000), EventKind::local, 7), 0U);
  // What nobody should do shows that it was not copied.
  if (order_is_seen_across_sides) std::memset(bare.end.region.address, 0xEE, bytes);
  std::uint64_t late = 0;
  std::vector<std::byte> chunk(bytes);
  for (std::uint64_t got = 0; got < bytes;) {
    tcp::ChunkHeader header;
    CHECK_EQ(receive_all(bare.lanes[1].fd(), &header, sizeof header), 0);
    CHECK_EQ(receive_all(bare.lanes[1].fd(), chunk.data(), header.bytes), 0);
    got += header.bytes;
    late += static_cast<std::uint64_t>(
        std::count(chunk.begin(), chunk.begin() + static_cast<std::ptrdiff_t>(header.bytes), std::byte{0xEE}));
  }
  CHECK(late > 0 || !order_is_seen_across_sides);
  bare.end.wait(EventKind::local, 7);
}

TEST(zero_copy, blocks_that_an_error_has_freed_are_not_sent_any_more) {
  constexpr std::uint64_t bytes = 512 << 10;
  Bare bare(bytes);
  std::memset(bare.end.region.address, 1, bytes);
  bare.end.context->post(*bare.plan, Op::push, {}, 7, nullptr);
  bare.await_taken(bytes);
  bare.lanes[0].shut();
  bare.end.wait(EventKind::error, 7);
  if (order_is_seen_across_sides) std::memset(bare.end.region.address, 0xEE, bytes);
  std::vector<std::byte> got(bytes);
  for (;;) {
    const ssize_t n = ::recv(bare.lanes[1].fd(), got.data(), got.size(), 0);
    if (n <= 0) break;
    CHECK_EQ(std::count(got.begin(), got.begin() + n, std::byte{0xEE}), 0);
  }
}

Rig rig() {
  return Rig(Subject("tcp", [] { return find_backend("tcp").open(token, on); }));
}

// A sending thread counts its calls when it is back from them; the confirmation may be quicker.
void await_told(const Rig& of, const std::string& wanted) {
  std::map<std::string, std::string> told;
  for (const Deadline deadline = soon(); !deadline.passed(); std::this_thread::yield()) {
    told = of.a.context->details();
    if (told.contains("zerocopy") && told.at("zerocopy").find(wanted) != std::string::npos) return;
  }
  throw Failure("not told: " + wanted);
}

TEST(zero_copy, a_socket_that_cannot_do_without_copies_is_refused) {
  const Socket local(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_THROWS(Fault::unavailable, "the kernel refuses zerocopy=1", tcp::allow_zero_copy(local.fd()));
}

TEST(zero_copy, more_transfers_than_the_kernel_may_hold_chunks_of) {
  Rig pair = rig();
  PlanPieces pieces;
  pieces.add(0, 0, 4096);
  const auto plans = pair.prepare(pieces);
  for (std::uint64_t tag = 1; tag <= 2000; ++tag) pair.move(plans, tag % 2 == 0 ? Op::push : Op::pull, tag);
  CHECK_EQ(pair.arrived(pieces), 1U);
  await_told(pair, "2000 calls, ");
  CHECK(pair.b.context->details().empty());
}

// No memory may be locked: for this thread, and those that it starts, not even by root.
class NoLockedMemory {
 public:
  NoLockedMemory() {
    ::getrlimit(RLIMIT_MEMLOCK, &limit_);
    const rlimit none{0, limit_.rlim_max};
    ::setrlimit(RLIMIT_MEMLOCK, &none);
    ::syscall(SYS_capget, &head_, had_.data());
    auto without = had_;
    without[0].effective &= ~(1U << CAP_IPC_LOCK);
    ::syscall(SYS_capset, &head_, without.data());
  }
  ~NoLockedMemory() {
    ::syscall(SYS_capset, &head_, had_.data());
    ::setrlimit(RLIMIT_MEMLOCK, &limit_);
  }
  NoLockedMemory(const NoLockedMemory&) = delete;
  NoLockedMemory& operator=(const NoLockedMemory&) = delete;

 private:
  rlimit limit_{};
  __user_cap_header_struct head_{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> had_{};
};

TEST(zero_copy, what_the_kernel_has_no_room_for_is_copied_and_told) {
  const NoLockedMemory limit;
  Rig pair = rig();
  PlanPieces pieces;
  pieces.add(0, 0, 1 << 20);
  const auto plans = pair.prepare(pieces);
  pair.move(plans, Op::push, 1);
  CHECK_EQ(pair.arrived(pieces), 1U);
  await_told(pair, "0 calls, 0 of them copied by the kernel all the same; 4 more copied for want of room");
}

}  // namespace
}  // namespace kvxfer::test
