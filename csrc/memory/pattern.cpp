#include "memory/pattern.h"

#include <cstring>

#include "memory/parallel.h"

namespace kvxfer {

namespace {

constexpr std::uint64_t word_step = 0x9e3779b97f4a7c15;   // odd: all words of a block differ
constexpr std::uint64_t epoch_step = 0xd1b54a32d192ed03;  // odd, and no small multiple of word_step

// splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection that spreads every input bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t base_word(std::uint64_t seed, std::uint32_t region, std::uint32_t block) {
  return mix(mix(seed + word_step) ^ (static_cast<std::uint64_t>(region) << 32 | block));
}

std::byte* block_at(const PoolView& pool, std::size_t region, std::uint32_t block) {
  const PoolView::Region& r = pool.regions[region];
  return r.address + block * r.block_bytes;
}

void write_block(std::byte* at, std::uint64_t bytes, std::uint64_t base) {
  const std::uint64_t words = bytes / 8;
  for (std::uint64_t w = 0; w < words; ++w) {
    const std::uint64_t value = base + w * word_step;
    std::memcpy(at + w * 8, &value, 8);
  }
  const std::uint64_t tail = base + words * word_step;
  std::memcpy(at + words * 8, &tail, bytes % 8);
}

// Words of a block that differ; `first` gets the lowest one when there is any.
std::uint64_t compare_block(const std::byte* at, std::uint64_t bytes, std::uint64_t base, std::uint64_t epoch,
                            std::uint64_t& first) {
  const std::uint64_t words = bytes / 8;
  std::uint64_t seen = 0;
  std::uint64_t expected = base + epoch * epoch_step;
  const std::uint64_t whole = bytes < 8 ? bytes : 8;
  std::memcpy(&seen, at, whole);
  if (whole < 8) expected &= (std::uint64_t{1} << (8 * whole)) - 1;
  std::uint64_t wrong = seen != expected ? 1 : 0;
  if (wrong != 0) first = 0;

  // Most blocks are right: look for any difference at memory speed, and count only then.
  std::uint64_t difference = 0;
  for (std::uint64_t w = 1; w < words; ++w) {
    std::memcpy(&seen, at + w * 8, 8);
    difference |= seen ^ (base + w * word_step);
  }
  if (difference != 0) {
    for (std::uint64_t w = words; w-- > 1;) {
      std::memcpy(&seen, at + w * 8, 8);
      if (seen == base + w * word_step) continue;
      ++wrong;
      if (wrong == 1 || first != 0) first = w;
    }
  }
  const std::uint64_t tail_bytes = words == 0 ? 0 : bytes % 8;
  if (tail_bytes != 0) {
    const std::uint64_t tail = base + words * word_step;
    if (std::memcmp(at + words * 8, &tail, tail_bytes) != 0) {
      if (wrong == 0) first = words;
      ++wrong;
    }
  }
  return wrong;
}

}  // namespace

void fill(const PoolView& pool, std::uint64_t seed) {
  const std::size_t blocks = pool.blocks;
  parallel_ranges(pool.regions.size() * blocks, usable_cores(), [&](std::size_t begin, std::size_t end, std::size_t) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto region = static_cast<std::uint32_t>(i / blocks);
      const auto block = static_cast<std::uint32_t>(i % blocks);
      write_block(block_at(pool, region, block), pool.regions[region].block_bytes, base_word(seed, region, block));
    }
  });
}

void poison(std::byte* address, std::uint64_t bytes) {
  constexpr std::uint64_t slice = std::uint64_t{1} << 20;
  parallel_ranges(bytes / slice + 1, usable_cores(), [&](std::size_t begin, std::size_t end, std::size_t) {
    const std::uint64_t from = begin * slice;
    const std::uint64_t to = end * slice < bytes ? end * slice : bytes;
    if (from < to) std::memset(address + from, static_cast<int>(poison_byte), to - from);
  });
}

Verification verify(const PoolView& pool, std::span<const std::uint32_t> own, std::span<const std::uint32_t> source,
                    std::uint64_t seed, std::uint64_t epoch, std::uint32_t every) {
  const std::size_t blocks = own.size();
  const std::size_t pairs = pool.regions.size() * blocks;
  const std::size_t checked = (pairs + every - 1) / every;
  std::vector<Verification> parts(usable_cores());
  parallel_ranges(checked, parts.size(), [&](std::size_t begin, std::size_t end, std::size_t worker) {
    Verification part;
    for (std::size_t i = begin; i < end; ++i) {
      const auto region = static_cast<std::uint32_t>(i * every / blocks);
      const auto block = static_cast<std::uint32_t>(i * every % blocks);
      const std::uint64_t bytes = pool.regions[region].block_bytes;
      std::uint64_t first = 0;
      const std::uint64_t wrong = compare_block(block_at(pool, region, own[block]), bytes,
                                                base_word(seed, region, source[block]), epoch, first);
      if (wrong != 0 && part.wrong_words == 0) part.first = {region, block, first};
      part.wrong_words += wrong;
      part.bytes_checked += bytes;
    }
    parts[worker] = part;
  });
  Verification all;
  for (const Verification& part : parts) {  // in order, so the first wrong place is the lowest
    if (part.wrong_words != 0 && all.wrong_words == 0) all.first = part.first;
    all.wrong_words += part.wrong_words;
    all.bytes_checked += part.bytes_checked;
  }
  return all;
}

void stamp(const PoolView& pool, std::span<const std::uint32_t> table, std::uint64_t seed, std::uint64_t epoch) {
  for (std::uint32_t region = 0; region < pool.regions.size(); ++region) {
    const std::uint64_t bytes = pool.regions[region].block_bytes;
    for (const std::uint32_t block : table) {
      const std::uint64_t word = base_word(seed, region, block) + epoch * epoch_step;
      std::memcpy(block_at(pool, region, block), &word, bytes < 8 ? bytes : 8);
    }
  }
}

std::uint64_t wrong_epochs(const PoolView& pool, std::span<const std::uint32_t> own,
                           std::span<const std::uint32_t> source, std::uint64_t seed, std::uint64_t epoch) {
  std::uint64_t wrong = 0;
  for (std::uint32_t region = 0; region < pool.regions.size(); ++region) {
    const std::uint64_t bytes = pool.regions[region].block_bytes;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::uint64_t word = base_word(seed, region, source[i]) + epoch * epoch_step;
      if (std::memcmp(block_at(pool, region, own[i]), &word, bytes < 8 ? bytes : 8) != 0) ++wrong;
    }
  }
  return wrong;
}

}  // namespace kvxfer
