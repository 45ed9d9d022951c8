// Copies of many pieces: the memcpy reference, and what backends copy with.
#pragma once

#include <sys/uio.h>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/clock.h"

namespace kvxfer {

// The memcpy reference: the pieces of a request copied one by one, by one thread. Returns how long it took. The three
// spans are of equal length; the caller answers for the bounds.
Nanoseconds copy_pieces(std::byte* to, std::span<const std::uint64_t> to_offsets, const std::byte* from,
                        std::span<const std::uint64_t> from_offsets, std::span<const std::uint64_t> lengths);

// Copies pieces of pairwise equal length. Past the caches: what is written is not read into the cache first and does
// not stay there, which is a third less traffic for memory and right for more than the caches hold.
void copy_vectors(std::span<const iovec> to, std::span<const iovec> from, bool past_caches);

// Of the last-level cache; a usual size when the kernel does not tell.
std::uint64_t cache_bytes();

}  // namespace kvxfer
