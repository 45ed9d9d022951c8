#include "memory/pattern.h"

#include <algorithm>
#include <cstring>

#include "memory/parallel.h"

namespace kvxfer {

namespace {

constexpr std::uint64_t page_bytes = 4096;
constexpr std::uint64_t page_words = page_bytes / 8;
constexpr std::uint64_t line_words = 8;  // of a cache line: what loops take at once
// What a processor fetches by itself ends with a page, or with a piece.
constexpr std::ptrdiff_t fetch_ahead = 1024;
constexpr std::uint64_t word_step = 0x9e3779b97f4a7c15;   // odd: all words of a page differ
constexpr std::uint64_t epoch_step = 0xd1b54a32d192ed03;  // odd, and no small multiple of word_step

// splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection that spreads every input bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The pattern of one region.
class Pattern {
 public:
  Pattern(std::uint64_t seed, std::uint32_t region)
      : key_(mix(mix(seed + word_step) + static_cast<std::uint64_t>(region) * epoch_step)) {}

  std::uint64_t base(std::uint64_t page) const { return mix(key_ ^ page); }

  // The 8 bytes from `offset` on, wherever that is.
  std::uint64_t at(std::uint64_t offset) const {
    const std::uint64_t low = word(offset / 8);
    const unsigned shift = static_cast<unsigned>(offset % 8) * 8;
    return shift == 0 ? low : low >> shift | word(offset / 8 + 1) << (64 - shift);
  }

 private:
  std::uint64_t word(std::uint64_t w) const { return base(w / page_words) + (w % page_words) * word_step; }

  std::uint64_t key_;
};

// Bytes of a word that a piece of `bytes` has from word `w` on.
std::uint64_t word_bytes(std::uint64_t bytes, std::uint64_t w) { return std::min<std::uint64_t>(8, bytes - w * 8); }

bool same(const std::byte* at, std::uint64_t expected, std::uint64_t bytes) {
  if (bytes != 8) return std::memcmp(at, &expected, bytes) == 0;
  std::uint64_t seen = 0;
  std::memcpy(&seen, at, 8);
  return seen == expected;
}

void put(std::byte* at, std::uint64_t word, std::uint64_t bytes) {
  if (bytes == 8)
    std::memcpy(at, &word, 8);
  else
    std::memcpy(at, &word, bytes);
}

void write_page(std::byte* at, std::uint64_t bytes, std::uint64_t base) {
  const auto write = [&](std::uint64_t words) {
#pragma GCC unroll 4  // a shorter loop takes twice as long where it happens to lie badly in the code
    for (std::uint64_t w = 0; w < words; ++w) {
      const std::uint64_t value = base + w * word_step;
      std::memcpy(at + w * 8, &value, 8);
    }
  };
  if (bytes == page_bytes) return write(page_words);  // a number that the compiler knows
  const std::uint64_t words = bytes / 8;
  write(words);
  const std::uint64_t tail = base + words * word_step;
  std::memcpy(at + words * 8, &tail, bytes % 8);
}

// The bits in which `count` words from `at` on differ from expected(0), expected(1), ...; `end` is that of the piece.
template <typename Expected>
std::uint64_t difference(const std::byte* at, std::uint64_t count, const std::byte* end, const Expected& expected) {
  std::uint64_t found[line_words] = {};
  std::uint64_t w = 0;
  for (; w + line_words <= count; w += line_words) {
    const std::byte* const here = at + w * 8;
    if (end - here > fetch_ahead) __builtin_prefetch(here + fetch_ahead);
    std::uint64_t seen[line_words];
    std::memcpy(seen, here, sizeof seen);
    for (std::uint64_t i = 0; i < line_words; ++i) found[i] |= seen[i] ^ expected(w + i);
  }
  for (; w < count; ++w) {
    std::uint64_t seen = 0;
    std::memcpy(&seen, at + w * 8, 8);
    found[0] |= seen ^ expected(w);
  }
  std::uint64_t all = 0;
  for (const std::uint64_t one : found) all |= one;
  return all;
}

// Whether the whole words [1, words) of a piece are right; at memory speed.
bool all_right(const std::byte* piece, std::uint64_t words, const Pattern& pattern, std::uint64_t source) {
  const std::byte* const end = piece + words * 8;
  const unsigned shift = static_cast<unsigned>(source % 8) * 8;
  std::uint64_t wrong = 0;
  for (std::uint64_t w = 1; w < words;) {
    const std::uint64_t position = source / 8 + w;
    const std::uint64_t first = position % page_words;
    const std::uint64_t base = pattern.base(position / page_words) + first * word_step;
    if (shift == 0) {
      const std::uint64_t here = std::min(words - w, page_words - first);
      wrong |= difference(piece + w * 8, here, end, [base](std::uint64_t i) { return base + i * word_step; });
      w += here;
      continue;
    }
    // Each is the end of one word and the beginning of the next; the last one of a page is of two pages.
    const std::uint64_t here = std::min(words - w, page_words - 1 - first);
    wrong |= difference(piece + w * 8, here, end, [base, shift](std::uint64_t i) {
      return (base + i * word_step) >> shift | (base + (i + 1) * word_step) << (64 - shift);
    });
    w += here;
    if (w == words) break;
    wrong |= same(piece + w * 8, pattern.at(source + w * 8), 8) ? 0 : 1;
    ++w;
  }
  return wrong == 0;
}

std::byte* place(std::span<const Extent> regions, const Pieces& pieces, std::size_t i) {
  return regions[pieces.own_regions[i]].address + pieces.own_offsets[i];
}

// The beginning of the next piece, while this one is looked at.
void fetch(const std::byte* piece, std::uint64_t bytes) {
  const auto most = std::min<std::uint64_t>(bytes, fetch_ahead);
  for (std::uint64_t at = 0; at < most; at += 8 * line_words) __builtin_prefetch(piece + at);
}

struct Wrong {
  std::uint64_t words = 0;
  std::uint64_t first = 0;
};

Wrong compare_piece(const std::byte* piece, std::uint64_t bytes, const Pattern& pattern, std::uint64_t source,
                    std::uint64_t epoch) {
  Wrong wrong;
  const std::uint64_t words = (bytes + 7) / 8;
  const auto look_at = [&](std::uint64_t w) {
    const std::uint64_t expected = pattern.at(source + w * 8) + (w == 0 ? epoch * epoch_step : 0);
    if (same(piece + w * 8, expected, word_bytes(bytes, w))) return;
    if (wrong.words++ == 0) wrong.first = w;
  };
  if (words > 0) look_at(0);
  // Most pieces are right; only one that is not is looked at word by word.
  const bool whole_right = all_right(piece, bytes / 8, pattern, source);
  for (std::uint64_t w = whole_right ? std::max<std::uint64_t>(bytes / 8, 1) : 1; w < words; ++w) look_at(w);
  return wrong;
}

}  // namespace

void fill(std::span<const Extent> regions, std::uint64_t seed) {
  std::vector<std::uint64_t> first_page;  // of each region, counted through all of them
  std::uint64_t pages = 0;
  for (const Extent& region : regions) {
    first_page.push_back(pages);
    pages += (region.bytes + page_bytes - 1) / page_bytes;
  }
  parallel_ranges(pages, usable_cores(), [&](std::size_t begin, std::size_t end, std::size_t) {
    for (std::size_t at = begin; at < end;) {
      const auto after = std::upper_bound(first_page.begin(), first_page.end(), at);
      const auto r = static_cast<std::size_t>(after - first_page.begin()) - 1;
      const Extent& region = regions[r];
      const Pattern pattern(seed, static_cast<std::uint32_t>(r));
      const std::size_t stop = after == first_page.end() ? end : std::min<std::size_t>(end, *after);
      std::uint64_t page = at - first_page[r];
      std::uint64_t base = pattern.base(page);
      for (; at < stop; ++at, ++page) {
        const std::uint64_t next = pattern.base(page + 1);  // while this page is being written
        const std::uint64_t bytes = std::min(page_bytes, region.bytes - page * page_bytes);
        write_page(region.address + page * page_bytes, bytes, base);
        base = next;
      }
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

Verification verify(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed, std::uint64_t epoch,
                    std::uint32_t every) {
  const std::size_t checked = (pieces.count() + every - 1) / every;
  std::vector<Verification> parts(usable_cores());
  parallel_ranges(checked, parts.size(), [&](std::size_t begin, std::size_t end, std::size_t worker) {
    Verification part;
    for (std::size_t i = begin * every; i < end * every && i < pieces.count(); i += every) {
      if (pieces.count() - i > every) fetch(place(regions, pieces, i + every), pieces.lengths[i + every]);
      const std::byte* piece = place(regions, pieces, i);
      const Pattern pattern(seed, pieces.source_regions[i]);
      const Wrong wrong = compare_piece(piece, pieces.lengths[i], pattern, pieces.source_offsets[i], epoch);
      if (wrong.words != 0 && part.wrong_words == 0) {
        part.piece = i;
        part.word = wrong.first;
      }
      part.wrong_words += wrong.words;
      part.bytes_checked += pieces.lengths[i];
    }
    parts[worker] = part;
  });
  Verification all;
  for (const Verification& part : parts) {  // in order, so the first wrong place is the lowest
    if (part.wrong_words != 0 && all.wrong_words == 0) {
      all.piece = part.piece;
      all.word = part.word;
    }
    all.wrong_words += part.wrong_words;
    all.bytes_checked += part.bytes_checked;
  }
  return all;
}

void stamp(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed, std::uint64_t epoch) {
  for (std::size_t i = 0; i < pieces.count(); ++i) {
    const Pattern pattern(seed, pieces.source_regions[i]);
    const std::uint64_t word = pattern.at(pieces.source_offsets[i]) + epoch * epoch_step;
    put(place(regions, pieces, i), word, word_bytes(pieces.lengths[i], 0));
  }
}

std::uint64_t wrong_epochs(std::span<const Extent> regions, const Pieces& pieces, std::uint64_t seed,
                           std::uint64_t epoch) {
  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < pieces.count(); ++i) {
    const Pattern pattern(seed, pieces.source_regions[i]);
    const std::uint64_t word = pattern.at(pieces.source_offsets[i]) + epoch * epoch_step;
    if (!same(place(regions, pieces, i), word, word_bytes(pieces.lengths[i], 0))) ++wrong;
  }
  return wrong;
}

}  // namespace kvxfer
