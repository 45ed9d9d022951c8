#include "backends/ucx/ports.h"

#include <dirent.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "backend/error.h"

namespace kvxfer::ucx {

namespace {

constexpr std::size_t most_listeners = 256;  // one for each address of this host

bool takes_tcp_connections(int fd) {
  int domain = 0, listens = 0;
  socklen_t size = sizeof domain, other_size = sizeof listens;
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6) &&
         ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &other_size) == 0 && listens != 0;
}

template <typename Use>
void for_each_listener(DIR& descriptors, const Use& use) {
  ::rewinddir(&descriptors);
  while (const dirent* const entry = ::readdir(&descriptors))
    if (const int fd = std::atoi(entry->d_name); takes_tcp_connections(fd)) use(fd);
}

}  // namespace

std::vector<int> listeners_of(const std::function<void()>& open) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::unique_ptr<DIR, int (*)(DIR*)> descriptors(::opendir("/proc/self/fd"), ::closedir);
  if (descriptors == nullptr)
    throw system_error(Fault::unavailable, "the ports of UCX cannot be told from others (/proc/self/fd)", errno);
  std::vector<int> before, found;
  for_each_listener(*descriptors, [&](int fd) { before.push_back(fd); });
  found.reserve(most_listeners);  // once it is open, nothing may throw
  open();
  for_each_listener(*descriptors, [&](int fd) {
    if (std::ranges::find(before, fd) == before.end() && found.size() < found.capacity()) found.push_back(fd);
  });
  return found;
}

void admit_nobody(const std::vector<int>& listeners) noexcept {
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{1, &drop};
  for (const int fd : listeners)
    if (takes_tcp_connections(fd)) ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

}  // namespace kvxfer::ucx
