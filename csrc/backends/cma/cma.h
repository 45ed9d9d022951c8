// Cross-memory attach: the initiator has the kernel copy between its own memory and the peer's (process_vm_readv and
// process_vm_writev). Works with any memory, where the kernel allows one process to reach into another.
#pragma once

#include "backend/registry.h"

namespace kvxfer::cma {

Probe probe();
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::cma
