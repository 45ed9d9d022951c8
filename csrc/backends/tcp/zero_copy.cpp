#include "backends/tcp/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "backend/lane.h"

namespace kvxfer::tcp {

void Progress::add(const DoneCalls& done) {
  early_.push_back(done);
  for (std::size_t i = 0; i < early_.size();) {
    if (early_[i].first != below_) {
      ++i;
      continue;
    }
    below_ = early_[i].last + 1;
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
    i = 0;
  }
}

void allow_zero_copy(int fd) {
  const int on = 1;
  if (::setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0) return;
  throw system_error(Fault::unavailable, "the kernel refuses zerocopy=1 (it takes Linux 4.14); leave it out", errno);
}

int send_in_place(int fd, iovec* vectors, std::size_t count, Calls& calls) {
  return all_vectors(vectors, count, [fd, &calls](iovec* from, std::size_t n) {
    msghdr message{};
    message.msg_iov = from;
    message.msg_iovlen = n;
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_ZEROCOPY);
    if (sent > 0) ++calls.taken;
    // Room for what is under way (net.core.optmem_max), or memory that may be locked (ulimit -l), is used up.
    if (sent >= 0 || errno != ENOBUFS) return sent;
    ++calls.refused;
    return ::sendmsg(fd, &message, MSG_NOSIGNAL);
  });
}

std::optional<DoneCalls> take_done(int fd) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(sock_extended_err) + sizeof(sockaddr_in6))> room{};
  msghdr message{};
  message.msg_control = room.data();
  message.msg_controllen = room.size();
  if (::recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return std::nullopt;
  for (const cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, const_cast<cmsghdr*>(head))) {
    if (!(head->cmsg_level == SOL_IP && head->cmsg_type == IP_RECVERR) &&
        !(head->cmsg_level == SOL_IPV6 && head->cmsg_type == IPV6_RECVERR))
      continue;
    sock_extended_err news{};
    std::memcpy(&news, CMSG_DATA(head), sizeof news);
    if (news.ee_errno == 0 && news.ee_origin == SO_EE_ORIGIN_ZEROCOPY)
      return DoneCalls{news.ee_info, news.ee_data, (news.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0};
  }
  return std::nullopt;
}

void abort_connection(int fd) {
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  // By its number: ThreadSanitizer takes connect() for the making of the descriptor, which other threads use meanwhile.
  const auto ended = [&] { return ::syscall(SYS_connect, fd, &nowhere, sizeof nowhere) == 0 || errno != EBUSY; };
  if (ended()) return;
  // Some kernels refuse while a thread waits on it, which this ends.
  ::shutdown(fd, SHUT_RDWR);
  for (int tries = 0; tries < 100 && !ended(); ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace kvxfer::tcp
