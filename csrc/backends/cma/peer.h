// One peer of a cma context: another process, known by the number that the kernel gives for the other end of lane 0.
#pragma once

#include <sys/types.h>

#include "backend/copy_peer.h"

namespace kvxfer::cma {

// One call of process_vm_readv (pull) or process_vm_writev (push). The bytes copied, or minus the error code.
ssize_t call(Op op, pid_t process, std::span<const iovec> local, std::span<const iovec> remote);

// What a refused call means and what to do about it.
std::string why_refused(int code);

class CmaPeer final : public CopyPeer {
 public:
  // Throws Error(unavailable) when the peer's process has no number here.
  CmaPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort);
  ~CmaPeer() override;

  // Also tries to read the peer's memory once: a refusal is told here and not in the first transfer.
  std::shared_ptr<LanePlan> prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                    Deadline deadline) override;
  std::vector<std::string> describe() const override { return {"cma/process_vm"}; }

 protected:
  std::byte* locate(const RegionKey& key, Deadline deadline) override;
  int copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool past_caches) override;
  std::string why_not_copied(int code) const override;

 private:
  const pid_t process_;
  bool tried_ = false;  // application thread only
};

}  // namespace kvxfer::cma
