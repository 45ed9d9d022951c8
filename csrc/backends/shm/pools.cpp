#include "backends/shm/pools.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>

#include "backend/error.h"

namespace kvxfer::shm {

namespace {

constexpr std::uint64_t stat_block = 512;  // bytes, of st_blocks

}  // namespace

std::string why_unfit(int descriptor, std::uint64_t bytes) {
  struct stat status{};
  struct statfs system{};
  if (::fstat(descriptor, &status) != 0 || ::fstatfs(descriptor, &system) != 0 || !S_ISREG(status.st_mode) ||
      system.f_type != TMPFS_MAGIC)
    return "it is no shared memory";
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return "it is not sealed against becoming shorter";
  if ((seals & F_SEAL_WRITE) != 0) return "it is sealed against being written";
  // Its length counts only from now on: before it was sealed it could be anything.
  if (::fstat(descriptor, &status) != 0) return "it is no shared memory";
  const auto length = static_cast<std::uint64_t>(status.st_size);
  if (length < bytes) return "it is shorter than announced";
  if (static_cast<std::uint64_t>(status.st_blocks) < (length + stat_block - 1) / stat_block)
    return "it has holes, which this process would have to fill";
  return {};
}

std::shared_ptr<const Mapping> PeerPools::map(int descriptor, std::uint64_t bytes) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) throw system_error(Fault::unavailable, "cannot map a pool of the peer", errno);
  const Identity identity{status.st_dev, status.st_ino};
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& one) { return one.second.expired(); });
  std::shared_ptr<const Mapping> mapped = known_[identity].lock();
  if (!mapped || mapped->bytes() < bytes) {
    mapped = std::make_shared<const Mapping>(Mapping::of_peer(descriptor, bytes));
    known_[identity] = mapped;
  }
  return mapped;
}

}  // namespace kvxfer::shm
