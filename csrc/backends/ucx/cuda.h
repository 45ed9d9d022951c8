// What of CUDA's driver is not UCX's to do. Its library is opened when CUDA memory comes, and not before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::ucx {

// The CUDA context that a GPU's memory is of (or else the calling thread's). Throws Error(unavailable) where there is
// no driver, Error(usage) on other memory: UCX believes what it is told of memory, and would end the process later.
void* cuda_context_of(const std::byte* address, std::uint64_t bytes);

// From here on the calling thread's. Throws Error(unavailable).
void use_cuda_context(void* context);

}  // namespace kvxfer::ucx
