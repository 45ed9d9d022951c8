// The tcp backend: kernel sockets, scatter/gather system calls straight between blocks and socket.
#pragma once

#include <memory>

#include "backend/registry.h"

namespace kvxfer::tcp {

Probe probe();
// Options: connections (data connections per peer), chunk_kib (the most that one connection takes of a transfer at a
// time), pieces_per_call (descriptors per system call).
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::tcp
