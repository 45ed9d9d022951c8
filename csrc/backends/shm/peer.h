// One peer of a shm context. A pool of it is asked for by number when a plan first needs it, comes as a descriptor on
// lane 0, and stays mapped as long as the peer object lives, whatever becomes of the peer.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "backend/copy_peer.h"
#include "backends/shm/pools.h"

namespace kvxfer::shm {

class ShmPeer final : public CopyPeer {
 public:
  // The own memory of that number, nullptr when there is none; called on any thread until close().
  using FindPool = std::function<const Mapping*(std::uint32_t)>;

  ShmPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort, FindPool find_own,
          PeerPools& mapped);
  ~ShmPeer() override;

  std::vector<std::string> describe() const override { return {"shm/memfd"}; }

 protected:
  std::byte* locate(const RegionKey& key, Deadline deadline) override;
  int copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool past_caches) override;
  std::string why_not_copied(int code) const override;
  std::string handle(const Notice& notice, std::span<const std::uint32_t> segments) override;

 private:
  // The pool that the peer has been asked for: on its way, then mapped or not to be had.
  struct Wanted {
    std::uint32_t number = 0;
    std::shared_ptr<const Mapping> memory;
    std::string why_not;

    bool answered() const { return memory != nullptr || !why_not.empty(); }
  };

  const Mapping& remote_pool(std::uint32_t number, Deadline deadline);
  Wanted ask(std::uint32_t number, Deadline deadline);
  std::string show_pool(const Notice& notice);
  std::string take_pool(const Notice& notice);

  const FindPool find_own_;
  PeerPools& mapped_;
  std::map<std::uint32_t, std::shared_ptr<const Mapping>> pools_;  // application thread only
  std::optional<Wanted> wanted_;                                   // under mutex_
};

}  // namespace kvxfer::shm
