#include "memory/pattern.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "memory/copy.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t seed = 7;

// Two pools of the same shape; moves blocks as a transfer would.
struct Pools {
  std::vector<std::vector<std::byte>> memory;
  PoolView prefill, decode;

  Pools(std::vector<std::uint64_t> block_bytes, std::uint32_t blocks) {
    for (PoolView* pool : {&prefill, &decode}) {
      pool->blocks = blocks;
      for (const std::uint64_t bytes : block_bytes) {
        memory.emplace_back(bytes * blocks);
        pool->regions.push_back({memory.back().data(), bytes});
      }
    }
    fill(prefill, seed);
    for (const PoolView::Region& region : decode.regions) poison(region.address, region.block_bytes * blocks);
  }
  static std::byte* at(const PoolView& pool, std::size_t region, std::uint32_t block) {
    return pool.regions[region].address + block * pool.regions[region].block_bytes;
  }
  void move(const std::vector<std::uint32_t>& from, const std::vector<std::uint32_t>& to) const {
    for (std::size_t r = 0; r < prefill.regions.size(); ++r)
      for (std::size_t i = 0; i < from.size(); ++i)
        std::memcpy(at(decode, r, to[i]), at(prefill, r, from[i]), prefill.regions[r].block_bytes);
  }
};

TEST(pattern, a_moved_request_is_right_with_any_tail) {
  for (const std::uint64_t bytes : {1U, 7U, 8U, 9U, 15U, 64U, 100U, 4099U}) {
    const Pools pools({bytes, 2 * bytes}, 5);
    const std::vector<std::uint32_t> from{4, 0, 2}, to{1, 3, 0};
    stamp(pools.prefill, from, seed, 3);
    CHECK_EQ(verify(pools.decode, to, from, seed, 3, 1).wrong_words > 0, true);  // poison is no data
    pools.move(from, to);
    const Verification found = verify(pools.decode, to, from, seed, 3, 1);
    CHECK_EQ(found.wrong_words, 0U);
    CHECK_EQ(found.bytes_checked, 9 * bytes);
    CHECK_EQ(wrong_epochs(pools.decode, to, from, seed, 3), 0U);
  }
}

TEST(pattern, every_flipped_byte_is_found_and_named) {
  for (const std::uint64_t bytes : {5U, 8U, 67U}) {
    const Pools pools({bytes, bytes}, 3);
    const std::vector<std::uint32_t> table{2, 0};
    pools.move(table, table);
    for (std::size_t region = 0; region < 2; ++region)
      for (std::uint32_t i = 0; i < 2; ++i)
        for (std::uint64_t b = 0; b < bytes; ++b)
          for (const int mask : {1, 0x80, 0xff}) {
            std::byte& one = Pools::at(pools.decode, region, table[i])[b];
            one ^= static_cast<std::byte>(mask);
            const Verification found = verify(pools.decode, table, table, seed, 0, 1);
            one ^= static_cast<std::byte>(mask);
            CHECK_EQ(found.wrong_words, 1U);
            CHECK_EQ(found.first.region, region);
            CHECK_EQ(found.first.block, i);
            CHECK_EQ(found.first.word, b / 8);
          }
  }
}

TEST(pattern, the_first_of_several_wrong_words_is_named) {
  const Pools pools({80}, 2);
  const std::vector<std::uint32_t> table{0, 1};
  pools.move(table, table);
  for (const std::size_t word : {3U, 5U, 9U}) Pools::at(pools.decode, 0, 1)[8 * word] ^= std::byte{1};
  const Verification found = verify(pools.decode, table, table, seed, 0, 1);
  CHECK_EQ(found.wrong_words, 3U);
  CHECK_EQ(found.first.block, 1U);
  CHECK_EQ(found.first.word, 3U);
}

TEST(pattern, swapped_blocks_regions_and_halves_are_wrong) {
  const Pools pools({64, 64}, 4);
  const std::vector<std::uint32_t> table{0, 1, 2, 3};
  pools.move({1, 0, 2, 3}, table);
  CHECK_EQ(verify(pools.decode, table, table, seed, 0, 1).wrong_words, 2U * 2 * 8);
  CHECK_EQ(wrong_epochs(pools.decode, table, table, seed, 0), 4U);

  pools.move(table, table);
  std::vector<std::byte> kept(64);
  std::byte* const k = Pools::at(pools.decode, 0, 2);
  std::byte* const v = Pools::at(pools.decode, 1, 2);
  std::memcpy(kept.data(), k, 64);
  std::memcpy(k, v, 64);
  std::memcpy(v, kept.data(), 64);
  CHECK_EQ(verify(pools.decode, table, table, seed, 0, 1).wrong_words, 16U);

  pools.move(table, table);
  std::memcpy(kept.data(), k, 32);
  std::memcpy(k, k + 32, 32);
  std::memcpy(k + 32, kept.data(), 32);
  CHECK_EQ(verify(pools.decode, table, table, seed, 0, 1).wrong_words, 8U);
}

TEST(pattern, a_shifted_token_is_wrong) {
  const Pools pools({256}, 1);
  const std::vector<std::uint32_t> table{0};
  for (const std::uint64_t shift : {1U, 2U, 8U, 16U, 128U}) {
    pools.move(table, table);
    std::byte* const block = Pools::at(pools.decode, 0, 0);
    std::memmove(block + shift, block, 256 - shift);
    CHECK(verify(pools.decode, table, table, seed, 0, 1).wrong_words >= (256 - shift) / 8);
  }
}

TEST(pattern, another_epoch_or_seed_is_wrong) {
  const Pools pools({64}, 3);
  const std::vector<std::uint32_t> table{2, 1};
  stamp(pools.prefill, table, seed, 5);
  pools.move(table, table);
  CHECK_EQ(wrong_epochs(pools.decode, table, table, seed, 5), 0U);
  CHECK_EQ(verify(pools.decode, table, table, seed, 5, 1).wrong_words, 0U);
  for (const std::uint64_t epoch : {0U, 4U, 6U, 1000U}) {
    CHECK_EQ(wrong_epochs(pools.decode, table, table, seed, epoch), 2U);
    CHECK_EQ(verify(pools.decode, table, table, seed, epoch, 1).wrong_words, 2U);
  }
  CHECK_EQ(verify(pools.decode, table, table, seed + 1, 5, 1).wrong_words, 16U);
}

TEST(pattern, every_nth_pair_is_looked_at_and_no_other) {
  const Pools pools({64, 64}, 5);
  std::vector<std::uint32_t> table(5);
  std::iota(table.begin(), table.end(), 0U);
  pools.move(table, table);
  for (const std::uint32_t every : {2U, 3U, 7U, 100U})
    for (std::uint32_t pair = 0; pair < 10; ++pair) {
      std::byte& one = *Pools::at(pools.decode, pair / 5, pair % 5);
      one ^= std::byte{4};
      const Verification found = verify(pools.decode, table, table, seed, 0, every);
      one ^= std::byte{4};
      CHECK_EQ(found.wrong_words, pair % every == 0 ? 1U : 0U);
      CHECK_EQ(found.bytes_checked, 64U * ((10 + every - 1) / every));
    }
}

TEST(pattern, an_empty_request_is_right) {
  const Pools pools({64}, 2);
  CHECK_EQ(verify(pools.decode, {}, {}, seed, 0, 1).bytes_checked, 0U);
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
