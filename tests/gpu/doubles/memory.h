// Where the memory of the GPU that is none lies: at addresses that nobody can read or write, so that a CPU that tries
// ends its process. What they hold lies elsewhere, at the same distance in every process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace double_gpu {

inline constexpr std::uint64_t begin = std::uint64_t{1} << 45, bytes = std::uint64_t{1} << 28;
inline constexpr std::uint64_t distance = std::uint64_t{1} << 40;

inline bool holds(std::uint64_t address) { return address >= begin && address - begin < bytes; }

// Of an address of the GPU, where its bytes really are; of any other, itself.
inline std::uint64_t real(std::uint64_t address) { return holds(address) ? address + distance : address; }

}  // namespace double_gpu
