#include "backends/cma/peer.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "backends/cma/access.h"

namespace kvxfer::cma {

namespace {

// As the kernel knows it: of whoever connected, or called listen(). Right across pid namespaces.
pid_t process_behind(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw system_error(Fault::unavailable, "the kernel does not tell which process the peer is", errno);
  if (credentials.pid <= 0)
    throw Error(
        Fault::unavailable,
        "the peer runs in a pid namespace that this process cannot see into (another container): let both share "
        "one (such as docker --pid), or use backend shm or tcp");
  return credentials.pid;
}

}  // namespace

CmaPeer::CmaPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort)
    : CopyPeer(events, id, std::move(lanes), effort), process_(process_behind(lanes_[0].fd())) {
  // Under Yama a process may reach only into its children, unless it is named: the latest peer's process is. Without
  // Yama this fails, and is not needed.
  ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(process_), 0, 0, 0);
}

CmaPeer::~CmaPeer() { close(); }  // its threads use what is destroyed next

std::byte* CmaPeer::locate(const RegionKey& key, Deadline) {
  if (key.place == 0 || key.bytes > UINTPTR_MAX - key.place)
    throw Error(Fault::usage, "the peer's keys name memory that cannot be");
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(key.place));
}

std::shared_ptr<LanePlan> CmaPeer::prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                           Deadline deadline) {
  auto made = CopyPeer::prepare(arrays, regions, deadline);  // from here on the peer has named this process to Yama
  if (!tried_ && made->bytes() > 0) try_access(*made);
  return made;
}

void CmaPeer::try_access(const LanePlan& plan) {
  iovec local{}, remote{};
  std::uint64_t at = 0;
  while (local.iov_len == 0) plan.pieces(at, 1, {&local, 1}, {&remote, 1});
  std::byte read{};
  local = {&read, 1};
  const ssize_t done = call(Op::pull, process_, {&local, 1}, {&remote, 1});
  const int code = done < 0 ? static_cast<int>(-done) : try_to_write(process_);
  if (code == ESRCH) throw Error(Fault::peer_lost, why_not_copied(code));
  if (code != 0) throw Error(code == EFAULT ? Fault::usage : Fault::unavailable, why_not_copied(code));
  tried_ = true;
}

// The number might mean another process once the peer has died; but then lane 0 has ended, and between two chunks the
// copy threads see that, long before the kernel comes around to the same number.
int CmaPeer::copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool) {
  std::size_t used = advance(local.data(), local.size(), 0);  // what is empty would look like an end
  advance(remote.data(), remote.size(), 0);
  while (used < local.size()) {
    const ssize_t done = call(op, process_, local.subspan(used), remote.subspan(used));
    if (done == -EINTR) continue;
    if (done <= 0) return done == 0 ? EFAULT : static_cast<int>(-done);
    // Fewer bytes than asked for: the next call goes on there, or says why not.
    const std::size_t left = local.size() - used;
    advance(remote.data() + used, left, static_cast<std::size_t>(done));
    used += advance(local.data() + used, left, static_cast<std::size_t>(done));
  }
  return 0;
}

std::string CmaPeer::why_not_copied(int code) const {
  if (code == ESRCH) return "the peer's process is gone";
  if (code == EFAULT) return "memory that a key of the peer names, or a region here, is not there (any more)";
  return why_refused(code);
}

}  // namespace kvxfer::cma
