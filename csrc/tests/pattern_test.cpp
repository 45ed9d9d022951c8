#include "memory/pattern.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "memory/copy.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t seed = 7;
constexpr std::uint64_t page = 4096;

void add(Pieces& pieces, std::uint32_t source_region, std::uint64_t source_offset, std::uint32_t own_region,
         std::uint64_t own_offset, std::uint64_t length) {
  pieces.own_regions.push_back(own_region);
  pieces.own_offsets.push_back(own_offset);
  pieces.source_regions.push_back(source_region);
  pieces.source_offsets.push_back(source_offset);
  pieces.lengths.push_back(length);
}

// The pieces as the prefill side has them: where they come from is where they lie.
Pieces at_source(const Pieces& pieces) {
  Pieces mine = pieces;
  mine.own_regions = mine.source_regions;
  mine.own_offsets = mine.source_offsets;
  return mine;
}

// A prefill and a decode side with regions of these sizes; moves pieces as a transfer would.
struct Sides {
  std::vector<std::vector<std::byte>> memory;
  Regions prefill, decode;

  explicit Sides(const std::vector<std::uint64_t>& bytes) : Sides(bytes, bytes) {}
  Sides(const std::vector<std::uint64_t>& prefill_bytes, const std::vector<std::uint64_t>& decode_bytes) {
    memory.reserve(prefill_bytes.size() + decode_bytes.size());
    for (const auto& [regions, sizes] : {std::pair{&prefill, &prefill_bytes}, {&decode, &decode_bytes}})
      for (const std::uint64_t size : *sizes) {
        memory.emplace_back(size);
        regions->push_back({memory.back().data(), size});
      }
    fill(prefill, seed);
    clear();
  }
  void clear() const {
    for (const Extent& region : decode) poison(region.address, region.bytes);
  }
  void move(const Pieces& pieces) const { move(pieces, pieces); }
  // What lies at the sources of `from` goes to where `to` has its pieces.
  void move(const Pieces& from, const Pieces& to) const {
    for (std::size_t i = 0; i < from.count(); ++i)
      std::memcpy(place(to, i), prefill[from.source_regions[i]].address + from.source_offsets[i], from.lengths[i]);
  }
  std::byte* place(const Pieces& pieces, std::size_t i) const {
    return decode[pieces.own_regions[i]].address + pieces.own_offsets[i];
  }
  Verification verified(const Pieces& pieces, std::uint64_t epoch = 0, std::uint32_t every = 1) const {
    return verify(decode, pieces, seed, epoch, every);
  }
  // Whether `pieces` are right on the prefill side.
  bool pristine(const Pieces& pieces) const { return verify(prefill, at_source(pieces), seed, 0, 1).wrong_words == 0; }
};

// Blocks of `bytes` from these to those, in every region.
Pieces blocks(std::uint32_t regions, std::uint64_t bytes, const std::vector<std::uint32_t>& from,
              const std::vector<std::uint32_t>& to) {
  Pieces pieces;
  for (std::uint32_t r = 0; r < regions; ++r)
    for (std::size_t i = 0; i < from.size(); ++i) add(pieces, r, from[i] * bytes, r, to[i] * bytes, bytes);
  return pieces;
}

TEST(pattern, a_moved_request_is_right_with_any_tail) {
  for (const std::uint64_t bytes : {1U, 7U, 8U, 9U, 15U, 64U, 100U, 4095U, 4096U, 4099U, 12'301U}) {
    const Sides sides({5 * bytes, 5 * bytes});
    const Pieces pieces = blocks(2, bytes, {4, 0, 2}, {1, 3, 0});
    stamp(sides.prefill, at_source(pieces), seed, 3);
    CHECK_EQ(sides.verified(pieces, 3).wrong_words > 0, true);  // poison is no data
    CHECK_EQ(wrong_epochs(sides.decode, pieces, seed, 3), 6U);
    sides.move(pieces);
    const Verification found = sides.verified(pieces, 3);
    CHECK_EQ(found.wrong_words, 0U);
    CHECK_EQ(found.bytes_checked, 6 * bytes);
    CHECK_EQ(wrong_epochs(sides.decode, pieces, seed, 3), 0U);
  }
}

// Every start within a word and every length, before, on and after the end of a page, to places that lie otherwise.
TEST(pattern, pieces_may_begin_and_end_anywhere) {
  const Sides sides({3 * page + 5});
  Pieces pieces;
  for (std::uint64_t from = page - 20; from < page + 10; ++from)
    for (const std::uint64_t length : {0U, 1U, 2U, 5U, 7U, 8U, 9U, 16U, 23U, 24U, 31U, 4096U, 4105U})
      add(pieces, 0, from, 0, (from * 7 + length) % page, length);
  add(pieces, 0, 2 * page - 3, 0, 1, page + 8);  // to the last byte of the region
  for (std::size_t i = 0; i < pieces.count(); ++i) {
    Pieces one;
    add(one, 0, pieces.source_offsets[i], 0, pieces.own_offsets[i], pieces.lengths[i]);
    const std::uint64_t words = (pieces.lengths[i] + 7) / 8;
    sides.clear();
    CHECK_EQ(sides.verified(one).wrong_words, words);
    stamp(sides.prefill, at_source(one), seed, 9);
    sides.move(one);
    CHECK_EQ(sides.verified(one, 9).wrong_words, 0U);
    CHECK_EQ(sides.verified(one, 9).bytes_checked, pieces.lengths[i]);
    CHECK_EQ(sides.verified(one, 8).wrong_words, words > 0 ? 1U : 0U);
    CHECK_EQ(wrong_epochs(sides.decode, one, seed, 9), 0U);
    CHECK_EQ(wrong_epochs(sides.decode, one, seed, 8), words > 0 ? 1U : 0U);
    stamp(sides.prefill, at_source(one), seed, 0);
  }
  CHECK(sides.pristine(pieces));
}

// The same bytes whatever the pieces: cut one way on one side, another way on the other.
TEST(pattern, the_pattern_does_not_depend_on_the_cut) {
  const Sides sides({5 * page + 3});
  Pieces whole;
  add(whole, 0, 0, 0, 0, 5 * page + 3);
  sides.move(whole);
  for (const std::uint64_t length : {1U, 3U, 8U, 1000U, 4096U, 4097U, 9000U}) {
    Pieces cut;
    for (std::uint64_t at = 0; at < 5 * page + 3; at += length)
      add(cut, 0, at, 0, at, std::min<std::uint64_t>(length, 5 * page + 3 - at));
    CHECK_EQ(sides.verified(cut).wrong_words, 0U);
    CHECK_EQ(sides.verified(cut).bytes_checked, 5 * page + 3);
  }
}

TEST(pattern, no_word_is_there_twice) {
  std::vector<std::uint64_t> words(1 << 16);
  for (const std::size_t shift : {0U, 1U, 5U}) {  // of the window that words are read through
    const std::uint64_t bytes = words.size() * 4 + shift;
    const Sides sides({bytes, bytes});
    for (std::size_t r = 0; r < 2; ++r)
      std::memcpy(words.data() + r * words.size() / 2, sides.prefill[r].address + shift, words.size() * 4);
    CHECK_EQ((std::set<std::uint64_t>(words.begin(), words.end()).size()), words.size());
  }
}

// Starts and ends within words, page ends inside, shorter than a word, and one byte.
TEST(pattern, every_flipped_byte_is_found_and_named) {
  const Sides sides({2 * page, 2 * page});
  Pieces pieces;
  std::uint64_t to = 1;
  for (const auto& [from, length] : {std::pair{0U, 5U},
                                     {8U, 8U},
                                     {24U, 67U},
                                     {99U, 1U},
                                     {101U, 7U},
                                     {110U, 9U},
                                     {121U, 64U},
                                     {4090U, 3U},
                                     {4085U, 20U},
                                     {4048U, 77U},
                                     {4096U - 33, 66U},
                                     {8192U - 19, 19U},
                                     {1000U, 200U},
                                     {1301U, 210U},
                                     {4000U, 200U},
                                     {4001U, 203U}})
    for (std::uint32_t region = 0; region < 2; ++region) {
      add(pieces, region, from, 1 - region, to, length);
      to += length + 3;
    }
  stamp(sides.prefill, at_source(pieces), seed, 4);  // the last of those that overlap: unstamped below
  stamp(sides.prefill, at_source(pieces), seed, 0);
  CHECK(sides.pristine(pieces));
  sides.move(pieces);
  stamp(sides.decode, pieces, seed, 4);  // no two of them overlap there
  CHECK_EQ(sides.verified(pieces, 4).wrong_words, 0U);
  for (std::size_t i = 0; i < pieces.count(); ++i)
    for (std::uint64_t b = 0; b < pieces.lengths[i]; ++b)
      for (const int mask : {1, 0x80, 0xff}) {
        std::byte& one = sides.place(pieces, i)[b];
        one ^= static_cast<std::byte>(mask);
        const Verification found = sides.verified(pieces, 4);
        one ^= static_cast<std::byte>(mask);
        CHECK_EQ(found.wrong_words, 1U);
        CHECK_EQ(found.piece, i);
        CHECK_EQ(found.word, b / 8);
      }
  // Bytes between the pieces are nobody's.
  for (const std::uint64_t outside : {pieces.own_offsets[2] - 1, pieces.own_offsets[2] + pieces.lengths[2]})
    sides.decode[1].address[outside] ^= std::byte{0xff};
  CHECK_EQ(sides.verified(pieces, 4).wrong_words, 0U);
}

TEST(pattern, the_first_of_several_wrong_words_is_named) {
  const Sides sides({10'000});
  Pieces pieces;
  for (std::uint64_t i = 0; i < 100; ++i) add(pieces, 0, i * 100, 0, i * 100, 83);
  sides.move(pieces);
  for (const std::size_t word : {9U, 3U, 10U}) sides.place(pieces, 41)[8 * word] ^= std::byte{1};
  for (const std::size_t later : {42U, 70U, 99U}) *sides.place(pieces, later) ^= std::byte{1};
  const Verification found = sides.verified(pieces);
  CHECK_EQ(found.wrong_words, 6U);
  CHECK_EQ(found.piece, 41U);
  CHECK_EQ(found.word, 3U);
}

TEST(pattern, swapped_pieces_regions_and_halves_are_wrong) {
  for (const std::uint64_t bytes : {64U, 4096U}) {
    const std::uint64_t words = bytes / 8;
    const Sides sides({4 * bytes, 4 * bytes});
    const Pieces pieces = blocks(2, bytes, {0, 1, 2, 3}, {0, 1, 2, 3});
    sides.move(blocks(2, bytes, {1, 0, 2, 3}, {0, 1, 2, 3}), pieces);
    CHECK_EQ(sides.verified(pieces).wrong_words, 2U * 2 * words);
    CHECK_EQ(wrong_epochs(sides.decode, pieces, seed, 0), 4U);

    sides.move(pieces);
    std::byte* const k = sides.place(pieces, 2);
    std::swap_ranges(k, k + bytes, sides.place(pieces, 4 + 2));
    CHECK_EQ(sides.verified(pieces).wrong_words, 2 * words);

    sides.move(pieces);
    std::swap_ranges(k, k + bytes / 2, k + bytes / 2);
    CHECK_EQ(sides.verified(pieces).wrong_words, words);
  }
}

TEST(pattern, a_shifted_token_is_wrong) {
  for (const std::uint64_t start : {0U, 3U, 4000U}) {
    const Sides sides({page + 256});
    Pieces pieces;
    add(pieces, 0, start, 0, start, 256);
    for (const std::uint64_t shift : {1U, 2U, 8U, 16U, 128U}) {
      sides.move(pieces);
      std::byte* const block = sides.place(pieces, 0);
      std::memmove(block + shift, block, 256 - shift);
      CHECK(sides.verified(pieces).wrong_words >= (256 - shift) / 8);
    }
  }
}

// A head that a rank took from its neighbour's share of a block, and one that it put into another's place.
TEST(pattern, a_slice_from_or_to_the_wrong_place_is_wrong) {
  const Sides sides({8 * 1024});
  Pieces right, from_neighbour, to_neighbour;
  for (std::uint64_t token = 0; token < 16; ++token) {
    add(right, 0, token * 512 + 128, 0, token * 128, 128);
    add(from_neighbour, 0, token * 512 + 256, 0, token * 128, 128);
    add(to_neighbour, 0, token * 512 + 128, 0, (token ^ 1) * 128, 128);
  }
  for (const Pieces* wrong : {&from_neighbour, &to_neighbour}) {
    sides.move(*wrong);
    CHECK_EQ(sides.verified(right).wrong_words, 16U * 16);
    CHECK_EQ(wrong_epochs(sides.decode, right, seed, 0), 16U);
  }
}

TEST(pattern, another_epoch_or_seed_is_wrong) {
  const Sides sides({3 * 64});
  const Pieces pieces = blocks(1, 64, {2, 1}, {2, 1});
  stamp(sides.prefill, pieces, seed, 5);
  sides.move(pieces);
  CHECK_EQ(wrong_epochs(sides.decode, pieces, seed, 5), 0U);
  CHECK_EQ(sides.verified(pieces, 5).wrong_words, 0U);
  for (const std::uint64_t epoch : {0U, 4U, 6U, 1000U}) {
    CHECK_EQ(wrong_epochs(sides.decode, pieces, seed, epoch), 2U);
    CHECK_EQ(sides.verified(pieces, epoch).wrong_words, 2U);
  }
  CHECK_EQ(verify(sides.decode, pieces, seed + 1, 5, 1).wrong_words, 16U);
}

// Two requests over the same memory, cut otherwise: stamps of one must not be left when the other moves.
TEST(pattern, stamps_of_requests_that_cut_the_same_memory_otherwise_come_out_again) {
  const Sides sides({3 * page}, {3 * page});
  std::mt19937_64 random(3);
  const auto any_cut = [&] {
    Pieces cut;
    for (std::uint64_t at = random() % 30; at < 3 * page;) {
      const std::uint64_t length =
          std::min<std::uint64_t>(1 + random() % (random() % 4 == 0 ? 6000 : 40), 3 * page - at);
      add(cut, 0, at, 0, at, length);
      at += length + random() % 3;
    }
    return cut;
  };
  const std::vector<std::byte> before(sides.prefill[0].address, sides.prefill[0].address + 3 * page);
  for (std::uint64_t epoch = 1; epoch <= 60; ++epoch) {
    const Pieces one = any_cut();
    const Pieces other = any_cut();
    stamp(sides.prefill, one, seed, epoch);
    sides.clear();
    sides.move(one);
    CHECK_EQ(sides.verified(one, epoch).wrong_words, 0U);
    CHECK(!sides.pristine(one));
    stamp(sides.prefill, one, seed, 0);
    CHECK(sides.pristine(other));
    CHECK(std::equal(before.begin(), before.end(), sides.prefill[0].address));

    stamp(sides.prefill, other, seed, epoch);
    sides.clear();
    sides.move(other);
    CHECK_EQ(sides.verified(other, epoch).wrong_words, 0U);
    CHECK_EQ(wrong_epochs(sides.decode, other, seed, epoch), 0U);
    stamp(sides.prefill, other, seed, 0);
    CHECK(sides.pristine(one));
  }
}

// Legs of one request that carry the same pieces to different peers, as replicated heads do.
TEST(pattern, the_same_piece_stamped_twice_is_stamped_once) {
  const Sides sides({page});
  Pieces pieces;
  add(pieces, 0, 16, 0, 16, 100);
  for (const std::uint64_t epoch : {6U, 6U}) stamp(sides.prefill, pieces, seed, epoch);
  sides.move(pieces);
  CHECK_EQ(sides.verified(pieces, 6).wrong_words, 0U);
  for (const std::uint64_t epoch : {0U, 0U}) stamp(sides.prefill, pieces, seed, epoch);
  CHECK(sides.pristine(pieces));
}

TEST(pattern, a_stamp_stays_inside_a_piece_shorter_than_a_word) {
  const Sides sides({64});
  const std::vector<std::byte> before(sides.prefill[0].address, sides.prefill[0].address + 64);
  for (std::uint64_t length = 0; length < 8; ++length)
    for (std::uint64_t at = 3; at < 20; ++at) {
      Pieces one;
      add(one, 0, at, 0, at, length);
      stamp(sides.prefill, one, seed, 1);
      for (std::uint64_t b = 0; b < 64; ++b)
        if (b < at || b >= at + length) CHECK(sides.prefill[0].address[b] == before[b]);
      CHECK_EQ(length > 0 && sides.pristine(one), false);
      stamp(sides.prefill, one, seed, 0);
    }
  CHECK(std::equal(before.begin(), before.end(), sides.prefill[0].address));
}

TEST(pattern, every_nth_piece_is_looked_at_and_no_other) {
  const Sides sides({5 * 64, 5 * 64});
  const Pieces pieces = blocks(2, 64, {0, 1, 2, 3, 4}, {4, 3, 2, 1, 0});
  sides.move(pieces);
  for (const std::uint32_t every : {2U, 3U, 7U, 10U, 100U, UINT32_MAX})
    for (std::uint32_t i = 0; i < 10; ++i) {
      std::byte& one = *sides.place(pieces, i);
      one ^= std::byte{4};
      const Verification found = sides.verified(pieces, 0, every);
      one ^= std::byte{4};
      CHECK_EQ(found.wrong_words, i % every == 0 ? 1U : 0U);
      if (i % every == 0) CHECK_EQ(found.piece, i);
      CHECK_EQ(found.bytes_checked, 64U * ((10 + std::uint64_t{every} - 1) / every));
    }
}

TEST(pattern, an_empty_request_is_right) {
  const Sides sides({128});
  CHECK_EQ(sides.verified({}).bytes_checked, 0U);
  CHECK_EQ(wrong_epochs(sides.decode, {}, seed, 1), 0U);
  stamp(sides.prefill, {}, seed, 1);
  Pieces nothing;
  add(nothing, 0, 128, 0, 128, 0);  // at the very end
  stamp(sides.prefill, nothing, seed, 1);
  CHECK_EQ(sides.verified(nothing, 1).wrong_words, 0U);
  CHECK_EQ(wrong_epochs(sides.decode, nothing, seed, 1), 0U);
}

// What a side has not of the regions of both is 0 bytes there; the others keep their numbers.
TEST(pattern, regions_of_no_bytes_are_left_alone) {
  const std::vector<std::uint64_t> sizes{0, 2 * page + 9, 0, 0, 1, 7, page, 0};
  std::vector<std::vector<std::byte>> memory;
  Regions regions;
  for (const std::uint64_t size : sizes) {
    memory.emplace_back(size + 2, std::byte{0xA5});
    regions.push_back({size > 0 ? memory.back().data() + 1 : nullptr, size});
  }
  fill(regions, seed);
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    CHECK(memory[r].front() == std::byte{0xA5} && memory[r][sizes[r] + 1] == std::byte{0xA5});
    if (sizes[r] == 0) continue;
    Pieces whole;
    add(whole, static_cast<std::uint32_t>(r), 0, static_cast<std::uint32_t>(r), 0, sizes[r]);
    CHECK_EQ(verify(regions, whole, seed, 0, 1).wrong_words, 0U);

    // Alone under its number, it holds the same.
    const std::vector<std::byte> kept = memory[r];
    Regions alone(sizes.size());
    alone[r] = regions[r];
    std::memset(regions[r].address, 0, sizes[r]);
    fill(alone, seed);
    CHECK(memory[r] == kept);
  }
  fill({}, seed);
  fill(Regions(3), seed);
}

TEST(copy, pieces_go_where_they_are_told) {
  std::vector<std::byte> from(100), to(100);
  for (std::size_t i = 0; i < 100; ++i) from[i] = static_cast<std::byte>(i);
  const std::vector<std::uint64_t> to_offsets{50, 0}, from_offsets{10, 90}, lengths{20, 5};
  CHECK(copy_pieces(to.data(), to_offsets, from.data(), from_offsets, lengths) >= 0);
  CHECK(std::memcmp(to.data() + 50, from.data() + 10, 20) == 0);
  CHECK(std::memcmp(to.data(), from.data() + 90, 5) == 0);
  CHECK(to[70] == std::byte{0} && to[5] == std::byte{0});
}

}  // namespace
}  // namespace kvxfer::test
