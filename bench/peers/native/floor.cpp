// What any mover has to do at least: the same pieces over bare sockets, and reading memory on all cores.
//
// A socket has a thread at each end, and carries its share of the pieces: the sender gathers up to 64 of them in a
// system call, the receiver scatters them likewise and then answers with a few bytes. No protocol, no queue, no lock.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t pieces_per_call = 64;
constexpr std::size_t call_bytes = std::size_t{1} << 20;
constexpr std::size_t answer_bytes = 48;

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

bool transfer(int fd, iovec* at, std::size_t count, bool send) {
  while (count > 0) {
    std::size_t used = 0;
    for (std::size_t bytes = 0; used < count && used < pieces_per_call && bytes < call_bytes; ++used)
      bytes += at[used].iov_len;
    msghdr message{};
    message.msg_iov = at;
    message.msg_iovlen = used;
    const ssize_t done = send ? ::sendmsg(fd, &message, MSG_NOSIGNAL) : ::recvmsg(fd, &message, MSG_WAITALL);
    if (done <= 0) return false;
    auto left = static_cast<std::size_t>(done);
    while (count > 0 && left >= at->iov_len) {
      left -= at->iov_len;
      ++at;
      --count;
    }
    if (left > 0) {
      at->iov_base = static_cast<char*>(at->iov_base) + left;
      at->iov_len -= left;
    }
  }
  return true;
}

// Once in each direction; `pieces` is this side's memory.
bool request(int fd, std::vector<iovec> pieces, bool sends) {
  char answer[answer_bytes] = {};
  iovec whole{answer, sizeof answer};
  return transfer(fd, pieces.data(), pieces.size(), sends) && transfer(fd, &whole, 1, !sends);
}

// Both ends of a socket on one CPU, those of the next on the next, where there are no more CPUs than sockets: as kvxfer
// keeps its connections. While it lives.
class OnCpu {
 public:
  OnCpu(std::size_t socket, std::size_t sockets) {
    if (::sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    const auto cpus = static_cast<std::size_t>(CPU_COUNT(&before_));
    if (cpus > sockets) return;
    std::size_t passed = socket % cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &before_) || passed-- != 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      moved_ = ::sched_setaffinity(0, sizeof one, &one) == 0;
      return;
    }
  }
  ~OnCpu() {
    if (moved_) ::sched_setaffinity(0, sizeof before_, &before_);
  }
  OnCpu(const OnCpu&) = delete;
  OnCpu& operator=(const OnCpu&) = delete;

 private:
  cpu_set_t before_{};
  bool moved_ = false;
};

}  // namespace

extern "C" {

void floor_no_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// Moves `requests` requests one after another; request i has `count` pieces from addresses[i * count] on. ns[i] is the
// time from the first byte posted to the last answer in place. 0, or -1 when a connection broke.
int floor_move(const int* fds, std::size_t sockets, bool sends, const std::uint64_t* addresses,
               const std::uint64_t* lengths, std::size_t count, std::size_t requests, std::int64_t* ns) {
  std::vector<char> failed(sockets);
  std::barrier together(static_cast<std::ptrdiff_t>(sockets));
  const auto one_socket = [&](std::size_t s) {
    const OnCpu here(s, sockets);
    const std::size_t from = count * s / sockets, to = count * (s + 1) / sockets;
    for (std::size_t r = 0; r < requests; ++r) {
      std::vector<iovec> pieces;
      for (std::size_t i = r * count + from; i < r * count + to; ++i)
        pieces.push_back({reinterpret_cast<void*>(addresses[i]), lengths[i]});
      together.arrive_and_wait();
      const std::int64_t began = now_ns();
      if (!failed[s] && !request(fds[s], std::move(pieces), sends)) failed[s] = 1;
      together.arrive_and_wait();
      if (s == 0) ns[r] = now_ns() - began;
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t s = 1; s < sockets; ++s) threads.emplace_back(one_socket, s);
  one_socket(0);
  for (std::thread& thread : threads) thread.join();
  return std::ranges::any_of(failed, [](char one) { return one != 0; }) ? -1 : 0;
}

// How long reading memory takes `threads` threads. The sum keeps the compiler from leaving it out.
std::int64_t floor_read(const std::uint64_t* words, std::size_t count, std::size_t threads, std::uint64_t* sum) {
  std::vector<std::uint64_t> sums(threads);
  const std::int64_t began = now_ns();
  const auto share = [&](std::size_t t) {
    std::uint64_t total = 0;
    for (std::size_t i = count * t / threads; i < count * (t + 1) / threads; ++i) total += words[i];
    sums[t] = total;
  };
  std::vector<std::thread> others;
  for (std::size_t t = 1; t < threads; ++t) others.emplace_back(share, t);
  share(0);
  for (std::thread& one : others) one.join();
  for (const std::uint64_t one : sums) *sum += one;
  return now_ns() - began;
}
}
