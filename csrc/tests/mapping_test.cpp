#include "memory/mapping.h"

#include <atomic>
#include <vector>

#include "memory/parallel.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

TEST(mapping, is_aligned_zeroed_and_writable_to_its_last_byte) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4097}, (std::uint64_t{5} << 20) + 3}) {
    const Mapping mapping(bytes);
    CHECK_EQ(mapping.bytes(), bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(mapping.address()) % (2U << 20), 0U);
    CHECK(mapping.address()[0] == std::byte{0});
    mapping.address()[bytes - 1] = std::byte{7};
    CHECK(mapping.address()[bytes - 1] == std::byte{7});
  }
}

TEST(mapping, moves_its_memory) {
  Mapping one(100);
  std::byte* const address = one.address();
  Mapping other(std::move(one));
  CHECK(other.address() == address);
  Mapping third;
  third = std::move(other);
  CHECK(third.address() == address);
}

TEST(mapping, refuses_what_cannot_be) {
  CHECK_THROWS(Fault::usage, "0 bytes", Mapping(0));
  CHECK_THROWS(Fault::unavailable, "no memory", Mapping(UINT64_MAX));
  CHECK_THROWS(Fault::unavailable, "no memory", Mapping(UINT64_MAX / 2));
  CHECK_THROWS(Fault::unavailable, "no memory", Mapping(std::uint64_t{1} << 50));
}

TEST(parallel, every_index_once_whatever_the_number_of_workers) {
  for (const std::size_t count : {0U, 1U, 2U, 7U, 100U})
    for (const std::size_t workers : {1U, 2U, 3U, 16U}) {
      std::vector<std::atomic<int>> seen(count);
      parallel_ranges(count, workers, [&](std::size_t begin, std::size_t end, std::size_t worker) {
        for (std::size_t i = begin; i < end; ++i) seen[i] += worker < workers ? 1 : 100;
      });
      for (const auto& times : seen) CHECK_EQ(times.load(), 1);
    }
}

}  // namespace
}  // namespace kvxfer::test
