#include "tests/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> count{0};
std::atomic<std::uint64_t> granted{0};  // so many more, and the one after them is refused
std::atomic<bool> refusing{false};
std::atomic<bool> only_new{false};

// Whether this one, by operator new or not, is the one to refuse.
bool refused(bool by_new) {
  return refusing.load() && (by_new || !only_new.load()) && granted.fetch_sub(1) == 0 && refusing.exchange(false);
}
}  // namespace

namespace kvxfer::test {
std::uint64_t allocations() { return count.load(); }

bool refuse_allocation(std::uint64_t n, Refused which) {
  const bool was_refusing = refusing.exchange(false);
  granted = n - 1;
  only_new = which == Refused::by_new;
  refusing = n > 0;
  return !was_refusing;
}
}  // namespace kvxfer::test

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)

#define KVXFER_MALLOC std::malloc

#else

#define KVXFER_MALLOC __libc_malloc

// In place of the C library's, which has these too under names of its own.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t n, std::size_t bytes);
void* __libc_realloc(void* made, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

// Refusing malloc(bytes) is what a full memory does: the C library says ENOMEM.
#define KVXFER_COUNTED(call)          \
  do {                                \
    ++count;                          \
    if (!refused(false)) return call; \
    errno = ENOMEM;                   \
    return nullptr;                   \
  } while (false)

void* malloc(std::size_t bytes) { KVXFER_COUNTED(__libc_malloc(bytes)); }
void* calloc(std::size_t n, std::size_t bytes) { KVXFER_COUNTED(__libc_calloc(n, bytes)); }
void* realloc(void* made, std::size_t bytes) { KVXFER_COUNTED(__libc_realloc(made, bytes)); }
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { KVXFER_COUNTED(__libc_memalign(alignment, bytes)); }
}

#endif

void* operator new(std::size_t bytes) {
  ++count;
  if (refused(true)) throw std::bad_alloc();
  if (void* made = KVXFER_MALLOC(bytes > 0 ? bytes : 1)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, std::size_t) noexcept { std::free(made); }
