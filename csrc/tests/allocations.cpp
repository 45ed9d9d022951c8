#include "tests/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> count{0};
}

namespace kvxfer::test {
std::uint64_t allocations() { return count.load(); }
}  // namespace kvxfer::test

void* operator new(std::size_t bytes) {
  ++count;
  if (void* made = std::malloc(bytes > 0 ? bytes : 1)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, std::size_t) noexcept { std::free(made); }
