// The tcp backend: kernel sockets, scatter/gather system calls straight between blocks and socket.
#pragma once

#include <memory>

#include "backend/registry.h"

namespace kvxfer::tcp {

Probe probe();
// Options: connections (data connections per peer), chunk_kib (the most that one connection takes of a transfer at a
// time), pieces_per_call (descriptors per system call), pin (a CPU for each connection: 0 no, 1 yes, 2 where there are
// no more CPUs than connections), reno_on_lo (not the system's congestion control within a host), busy_poll_us (polls
// the network card for so long before it sleeps), zerocopy (the kernel sends from the blocks themselves).
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::tcp
