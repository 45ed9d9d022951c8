// What the regions of the prefill side hold, so that every byte tells where it belongs.
//
// Word w (64 bits, little-endian) of page p (4 KiB) in region r is  base(seed, r, p) + w * step.  The base is a hash,
// so no two pages share words at the same place, and within a page every word differs: a flipped bit, a piece in the
// wrong place, two exchanged pieces and a shifted token are all seen, wherever pieces begin and end. While a request is
// being moved, the first word of each of its pieces carries the request's epoch on top.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvxfer {

// One region's memory. A list of these is indexed by region number; a region of 0 bytes is left alone.
struct Extent {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
};
using Regions = std::vector<Extent>;

// Pieces as arrays of equal length: where they lie on this side, and where they come from on the prefill side (the same
// there). Region numbers are those of either side.
struct Pieces {
  std::vector<std::uint32_t> own_regions;
  std::vector<std::uint64_t> own_offsets;
  std::vector<std::uint32_t> source_regions;
  std::vector<std::uint64_t> source_offsets;
  std::vector<std::uint64_t> lengths;

  std::size_t count() const { return lengths.size(); }
};

// Byte that fills the decode side before a verified request.
inline constexpr std::byte poison_byte{0xDB};

struct Verification {
  std::uint64_t bytes_checked = 0;
  std::uint64_t wrong_words = 0;  // of 8 bytes, counted from the start of each piece
  // The first wrong one, in the order of pieces; meaningless when wrong_words is 0.
  std::uint64_t piece = 0;
  std::uint64_t word = 0;  // within the piece
};

// All regions, without epochs, on all cores.
void fill(std::span<const Extent> regions, std::uint64_t seed);
void poison(std::byte* address, std::uint64_t bytes);

// Compares every `every`-th piece, 1: all, on all cores. The caller answers for pieces that lie inside their regions.
Verification verify(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed, std::uint64_t epoch,
                    std::uint32_t every);

// Write the epoch into the first word of each piece (epoch 0: take it out again), on the prefill side; count the pieces
// whose first word carries another one, on the decode side.
void stamp(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed, std::uint64_t epoch);
std::uint64_t wrong_epochs(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed,
                           std::uint64_t epoch);

}  // namespace kvxfer
