#include "backends/shm/peer.h"

#include "memory/copy.h"

namespace kvxfer::shm {

ShmPeer::ShmPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort, FindPool find_own,
                 PeerPools& mapped)
    : CopyPeer(events, id, std::move(lanes), effort), find_own_(std::move(find_own)), mapped_(mapped) {}

ShmPeer::~ShmPeer() { close(); }  // its threads use what is destroyed next

int ShmPeer::copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool past_caches) {
  if (op == Op::push)
    copy_vectors(remote, local, past_caches);
  else
    copy_vectors(local, remote, past_caches);
  return 0;
}

std::string ShmPeer::why_not_copied(int code) const { return closed_or(code); }

// --- the peer's pools ------------------------------------------------------------------------------------------------

void ShmPeer::import_keys(const std::string& keys) {
  LanePeer::import_keys(keys);
  for (const RegionKey& key : read_keys(keys)) {
    {
      const std::lock_guard lock(mutex_);
      const auto [known, fresh] = pools_.try_emplace(key.pool);
      if (!fresh && known->second.why_not.empty()) continue;  // mapped, or on its way
      known->second = {};
    }
    Notice wanted;
    wanted.kind = NoticeKind::pool_wanted;
    wanted.count = key.pool;
    send(wanted);
  }
}

std::byte* ShmPeer::locate(const RegionKey& key, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const RemotePool& pool = pools_.at(key.pool);  // import_keys made it
  if (!changed_.wait_until(lock, deadline.time_point(), [&] { return stopping_ || pool.answered(); }))
    throw Error(Fault::peer_lost, "the peer did not show its memory in time");
  if (!pool.answered()) throw Error(Fault::peer_lost, "the peer was lost before it showed its memory");
  if (!pool.memory) throw Error(Fault::unavailable, "the peer's memory cannot be used: " + pool.why_not);
  if (key.bytes > pool.memory->bytes() || key.place > pool.memory->bytes() - key.bytes)
    throw Error(Fault::usage, "the peer's keys name memory beyond its pool");
  return pool.memory->address() + key.place;
}

std::string ShmPeer::handle(const Notice& notice, std::span<const std::uint32_t> segments) {
  if (notice.kind == NoticeKind::pool_wanted) return show_pool(notice);
  if (notice.kind == NoticeKind::pool) return take_pool(notice);
  return CopyPeer::handle(notice, segments);
}

std::string ShmPeer::show_pool(const Notice& notice) {
  const Mapping* pool = notice.count <= UINT32_MAX ? find_own_(static_cast<std::uint32_t>(notice.count)) : nullptr;
  if (pool == nullptr) return "protocol error: it asks for memory that is not there";
  Notice answer;
  answer.kind = NoticeKind::pool;
  answer.count = notice.count;
  answer.total = pool->bytes();
  send(answer, nullptr, pool->descriptor());
  return {};
}

// The peer is given up when it shows something else than it should; what this side lacks is prepare()'s to tell.
std::string ShmPeer::take_pool(const Notice& notice) {
  {
    const std::lock_guard lock(mutex_);
    const auto wanted =
        notice.count <= UINT32_MAX ? pools_.find(static_cast<std::uint32_t>(notice.count)) : pools_.end();
    if (wanted == pools_.end() || wanted->second.answered()) return "protocol error: memory that nobody asked for";
  }
  RemotePool answer;
  if (!attached_.open()) {
    answer.why_not =
        "no descriptor came with it. This process has too many files open (raise ulimit -n), a security module keeps "
        "descriptors from passing, or the peer sent none";
  } else if (const std::string unfit = why_unfit(attached_.fd(), notice.total); !unfit.empty()) {
    return "protocol error: memory that cannot be trusted: " + unfit;
  } else {
    try {
      answer.memory = mapped_.map(attached_.fd(), notice.total);
    } catch (const Error& error) {
      answer.why_not = error.what();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    pools_[static_cast<std::uint32_t>(notice.count)] = std::move(answer);
  }
  changed_.notify_all();
  return {};
}

}  // namespace kvxfer::shm
