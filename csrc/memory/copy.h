// The memcpy reference: the pieces of a request copied one by one, by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/clock.h"

namespace kvxfer {

// Returns how long it took. The three spans are of equal length; the caller answers for the bounds.
Nanoseconds copy_pieces(std::byte* to, std::span<const std::uint64_t> to_offsets, const std::byte* from,
                        std::span<const std::uint64_t> from_offsets, std::span<const std::uint64_t> lengths);

}  // namespace kvxfer
