// A UCP context: which devices UCX uses, and the memory that it knows.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/ucx/library.h"
#include "backends/ucx/memory.h"

namespace kvxfer::ucx {

// What UCX does about a peer that dies. `peer`: it says so, and gives up shared memory for that. `none`: it may say
// nothing; then the notice lane alone tells.
enum class Errors : std::uint8_t { peer = 0, none = 1 };

class UcpContext {
 public:
  // Throws Error(unavailable) when UCX finds nothing to move data with, Error(usage) on settings that it does not take.
  UcpContext(const Library& library, Errors errors);
  ~UcpContext();
  UcpContext(const UcpContext&) = delete;
  UcpContext& operator=(const UcpContext&) = delete;

  const Library& library() const { return library_; }
  ucp_context_h get() const { return context_; }

  // The functions below from any thread.
  std::vector<Pool> pools() const;
  // Registers memory, unless it lies in what is registered already. A null address: UCX allocates it, so that it can be
  // reached from other processes. Throws Error(unavailable).
  Pool map(std::byte* address, std::uint64_t bytes);
  std::optional<std::size_t> find(const std::byte* address, std::uint64_t bytes) const;
  PoolKey key(std::size_t number) const;

 private:
  void set(ucp_config_t* config, const char* name, const char* value) const;

  const Library& library_;
  ucp_context_h context_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<Pool> pools_;
};

}  // namespace kvxfer::ucx
