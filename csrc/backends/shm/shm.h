// Shared memory: pools in memfd that both processes map, one copy from block to block by whoever initiates.
#pragma once

#include "backend/registry.h"

namespace kvxfer::shm {

Probe probe();
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::shm
