// A UCP context: which devices UCX uses, and the memory that it knows.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
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

  bool has_cuda() const { return why_no_cuda_.empty(); }
  void require_cuda() const;  // throws Error(unavailable)

  // The functions below from any thread. Those that register memory throw Error(unavailable).
  // Memory that is registered, all of it at once, when any of it is first to be used.
  void remember(std::byte* address, std::uint64_t bytes);
  // Registers memory, unless it is: all of what is remembered where it lies in that. Throws Error(usage) on memory of
  // another kind, as far as that is known.
  void map(std::byte* address, std::uint64_t bytes, MemoryKind kind);
  // Registered memory that UCX allocates, so that it can be reached from other processes.
  Pool allocate(std::uint64_t bytes);
  // All of it, registered.
  std::vector<Pool> pools();
  std::optional<std::size_t> find(const std::byte* address, std::uint64_t bytes) const;
  PoolKey key(std::size_t number);
  std::string kinds() const;  // of all of it, by name
  // Where there is CUDA memory its context becomes the calling thread's: UCX calls the driver in whichever thread lets
  // it work, and not always with a context of its own. Of several it is the first memory's; to copy a piece UCX takes
  // the piece's.
  void enter_cuda() const;

 private:
  std::string find_cuda() const;
  ucp_mem_h map_now(std::uint64_t address, std::uint64_t bytes, unsigned flags,
                    MemoryKind kind = MemoryKind::host) const;
  Pool registered(std::size_t number);
  void set(ucp_config_t* config, const char* name, const char* value) const;

  const Library& library_;
  ucp_context_h context_ = nullptr;
  std::string why_no_cuda_;  // and what to do about it; empty where there is
  mutable std::mutex mutex_;
  std::vector<Pool> pools_;  // without a handle: only remembered so far
  void* cuda_ = nullptr;     // the context of the first CUDA memory
};

}  // namespace kvxfer::ucx
