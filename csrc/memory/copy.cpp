#include "memory/copy.h"

#include <cstring>

namespace kvxfer {

Nanoseconds copy_pieces(std::byte* to, std::span<const std::uint64_t> to_offsets, const std::byte* from,
                        std::span<const std::uint64_t> from_offsets, std::span<const std::uint64_t> lengths) {
  const Nanoseconds began = now_ns();
  for (std::size_t i = 0; i < lengths.size(); ++i) std::memcpy(to + to_offsets[i], from + from_offsets[i], lengths[i]);
  return now_ns() - began;
}

}  // namespace kvxfer
