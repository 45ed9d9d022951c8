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

std::byte* ShmPeer::locate(const RegionKey& key, Deadline deadline) {
  const Mapping& pool = remote_pool(key.pool, deadline);
  if (key.bytes > pool.bytes() || key.place > pool.bytes() - key.bytes)
    throw Error(Fault::usage, "the peer's keys name memory beyond its pool");
  return pool.address() + key.place;
}

const Mapping& ShmPeer::remote_pool(std::uint32_t number, Deadline deadline) {
  while (!pools_.contains(number)) {
    const Wanted answer = ask(number, deadline);
    if (answer.memory)
      pools_[answer.number] = answer.memory;
    else if (answer.number == number)
      throw Error(Fault::unavailable, "the peer's memory cannot be used: " + answer.why_not);
  }
  return *pools_[number];
}

// One pool at a time: while each side has one question out at most, neither waits for the other to read its answers.
// Returns the answer to an earlier question if that one had to be left when its deadline passed.
ShmPeer::Wanted ShmPeer::ask(std::uint32_t number, Deadline deadline) {
  bool asked_before = false;
  {
    const std::lock_guard lock(mutex_);
    asked_before = wanted_.has_value();
    if (!asked_before) wanted_.emplace(Wanted{number, nullptr, {}});
  }
  if (!asked_before) {
    Notice notice;
    notice.kind = NoticeKind::pool_wanted;
    notice.count = number;
    send(notice);
  }
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline.time_point(), [&] { return stopping_ || wanted_->answered(); }))
    throw Error(Fault::peer_lost, "the peer did not show its memory in time");
  if (!wanted_->answered()) {
    lock.unlock();
    throw Error(Fault::peer_lost, "the peer was lost before it showed its memory: " + lost());
  }
  Wanted answer = std::move(*wanted_);
  wanted_.reset();
  return answer;
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
  Wanted answer;
  {
    const std::lock_guard lock(mutex_);
    if (!wanted_ || wanted_->answered() || wanted_->number != notice.count)
      return "protocol error: memory that nobody asked for";
    answer.number = wanted_->number;
  }
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
    wanted_ = std::move(answer);
  }
  changed_.notify_all();
  return {};
}

}  // namespace kvxfer::shm
