// What the blocks of a pool hold, so that every byte tells where it belongs.
//
// Word w (64 bits, little-endian) of block b in region r of the prefill side's pool is  base(seed, r, b) + w * step.
// The base is a hash, so no two blocks share words at the same place, and within a block every word differs: a flipped
// bit, a block in the wrong place, two exchanged pieces and a shifted token are all seen. Word 0 carries the epoch of
// the request on top.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvxfer {

// A paged pool as the pattern sees it: every region holds `blocks` blocks, region r of block_bytes[r] bytes each.
struct PoolView {
  struct Region {
    std::byte* address = nullptr;
    std::uint64_t block_bytes = 0;
  };
  std::vector<Region> regions;
  std::uint32_t blocks = 0;
};

// Byte that fills the decode side before a verified request.
inline constexpr std::byte poison_byte{0xDB};

struct WrongPlace {
  std::uint32_t region = 0;
  std::uint32_t block = 0;  // position in the request's block table
  std::uint64_t word = 0;   // within the block
};

struct Verification {
  std::uint64_t bytes_checked = 0;
  std::uint64_t wrong_words = 0;
  WrongPlace first;  // the first in (region, block, word) order; meaningless when wrong_words is 0
};

// The whole pool, epoch 0, on all cores.
void fill(const PoolView& pool, std::uint64_t seed);
void poison(std::byte* address, std::uint64_t bytes);

// Block i of the request lies at block own[i] of this pool and came from block source[i] of the prefill side's pool.
// Every `every`-th (region, block) pair is compared, 1: all. On all cores.
Verification verify(const PoolView& pool, std::span<const std::uint32_t> own, std::span<const std::uint32_t> source,
                    std::uint64_t seed, std::uint64_t epoch, std::uint32_t every);

// Write the epoch into word 0 of each block of the table in each region; count the blocks whose word 0 has another one.
void stamp(const PoolView& pool, std::span<const std::uint32_t> table, std::uint64_t seed, std::uint64_t epoch);
std::uint64_t wrong_epochs(const PoolView& pool, std::span<const std::uint32_t> own,
                           std::span<const std::uint32_t> source, std::uint64_t seed, std::uint64_t epoch);

}  // namespace kvxfer
