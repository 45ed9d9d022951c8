// One peer of a cma context: another process, known by the number that the kernel gives for the other end of lane 0.
#pragma once

#include <sys/types.h>

#include "backend/copy_peer.h"

namespace kvxfer::cma {

class CmaPeer final : public CopyPeer {
 public:
  // Throws Error(unavailable) when the peer's process has no number here.
  CmaPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort);
  ~CmaPeer() override;

  // Also tries once to reach the peer's memory, both ways: a refusal is told here and not in the first transfer.
  std::shared_ptr<LanePlan> prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                    Deadline deadline) override;
  std::vector<std::string> describe() const override { return {"cma/process_vm"}; }

 protected:
  std::byte* locate(const RegionKey& key, Deadline deadline) override;
  int copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool past_caches) override;
  std::string why_not_copied(int code) const override;

 private:
  void try_access(const LanePlan& plan);

  const pid_t process_;
  bool tried_ = false;  // application thread only
};

}  // namespace kvxfer::cma
