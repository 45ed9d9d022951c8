#include "memory/mapping.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "memory/copy.h"
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

TEST(mapping, shared_memory_is_seen_by_whoever_has_its_descriptor) {
  const Mapping one((std::uint64_t{3} << 20) + 5, Backing::shared);
  const Mapping other = Mapping::of_peer(one.descriptor(), one.bytes());
  CHECK(other.address() != one.address());
  CHECK_EQ(other.descriptor(), -1);
  one.address()[one.bytes() - 1] = std::byte{9};
  CHECK(other.address()[one.bytes() - 1] == std::byte{9});
  other.address()[0] = std::byte{8};
  CHECK(one.address()[0] == std::byte{8});
  CHECK(one.holds(one.address(), one.bytes()) && !one.holds(one.address() + 1, one.bytes()));
}

// By system calls, which no sanitizer keeps books of in memory of its own.
TEST(mapping, whoever_maps_shared_memory_meets_no_fault_on_first_write) {
  constexpr long pages = 2048;
  const Mapping one(pages * 4096, Backing::shared);
  const Mapping other = Mapping::of_peer(one.descriptor(), one.bytes());
  const int zeros = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
  rusage before{}, after{};
  ::getrusage(RUSAGE_THREAD, &before);
  const long got = ::syscall(SYS_read, zeros, other.address(), other.bytes());
  ::getrusage(RUSAGE_THREAD, &after);
  ::close(zeros);
  CHECK_EQ(got, pages * 4096);
  CHECK(after.ru_minflt - before.ru_minflt < pages / 16);
}

TEST(mapping, shared_memory_keeps_its_size) {
  const Mapping shared(10'000, Backing::shared);
  for (const off_t size : {0, 4096, 1 << 20}) CHECK(::ftruncate(shared.descriptor(), size) != 0 && errno == EPERM);
  CHECK((::fcntl(shared.descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK_THROWS(Fault::unavailable, "no memory", Mapping(std::uint64_t{1} << 50, Backing::shared));
  CHECK_THROWS(Fault::unavailable, "cannot map", Mapping::of_peer(0x7fffffff, 4096));
  CHECK_THROWS(Fault::unavailable, "no memory behind", Mapping::of_peer(shared.descriptor(), 1 << 20));
}

TEST(mapping, closes_its_descriptor) {
  const int before = ::dup(0);
  ::close(before);
  for (int round = 0; round < 3; ++round) CHECK_EQ(Mapping(4096, Backing::shared).descriptor(), before);
}

TEST(mapping, lies_on_the_numa_node_that_is_asked_for) {
  for (const Backing backing : {Backing::anonymous, Backing::shared}) {
    const Mapping bound(1 << 20, backing, 0);
    int policy = -1;
    unsigned long nodes[16] = {};
    CHECK_EQ(::syscall(SYS_get_mempolicy, &policy, nodes, 1024, bound.address(), MPOL_F_ADDR), 0);
    CHECK_EQ(policy, MPOL_BIND);
    CHECK_EQ(nodes[0], 1UL);
    for (const int unknown : {1000, 1024, 1 << 30})
      CHECK_THROWS(Fault::unavailable,
                   "NUMA node " + std::to_string(unknown) + " (nodes here: ", Mapping(4096, backing, unknown));
    CHECK_THROWS(Fault::usage, "NUMA node -2", Mapping(4096, backing, -2));
  }
}

TEST(copy_vectors, copies_exactly_what_it_should_wherever_it_begins) {
  constexpr std::size_t room = 80'000;
  std::vector<unsigned char> from(room), to(room), expected(room);
  for (std::size_t i = 0; i < room; ++i) from[i] = static_cast<unsigned char>(i * 31 + i / 255);
  for (const bool past_caches : {false, true})
    for (const std::size_t length : {0U, 1U, 63U, 64U, 65U, 200U, 4096U, 16'383U, 16'384U, 16'500U, 65'536U, 70'001U})
      for (const std::size_t at : {0U, 1U, 17U, 63U}) {
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0xEE));
        expected = to;
        std::copy_n(from.begin() + 5, length, expected.begin() + static_cast<std::ptrdiff_t>(at));
        const iovec target{to.data() + at, length}, source{from.data() + 5, length};
        copy_vectors({&target, 1}, {&source, 1}, past_caches);
        CHECK(to == expected);
      }
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
