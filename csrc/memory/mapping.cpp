#include "memory/mapping.h"

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "backend/error.h"
#include "memory/parallel.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14, not in older headers
#define MADV_POPULATE_WRITE 23
#endif

namespace kvxfer {

std::size_t usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    const int cores = CPU_COUNT(&set);
    if (cores > 0) return static_cast<std::size_t>(cores);
  }
  const unsigned all = std::thread::hardware_concurrency();
  return all > 0 ? all : 1;
}

namespace {

constexpr std::uint64_t huge_page = std::uint64_t{2} << 20;
constexpr std::uint64_t small_page = 4096;

// Older kernels do not know MADV_POPULATE_WRITE: write one byte per page instead.
int populate(std::byte* address, std::uint64_t bytes) {
  if (::madvise(address, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (std::uint64_t at = 0; at < bytes; at += small_page)
    *reinterpret_cast<volatile std::byte*>(address + at) = std::byte{0};
  return 0;
}

}  // namespace

Mapping::Mapping(std::uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) throw Error(Fault::usage, "a pool of 0 bytes was asked for");
  if (bytes > UINT64_MAX - 2 * huge_page) throw Error(Fault::unavailable, "no memory: the pool exceeds 64 bits");
  const std::uint64_t rounded = (bytes + small_page - 1) / small_page * small_page;
  mapped_ = rounded + huge_page;
  base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    const int code = errno;
    base_ = nullptr;
    throw system_error(Fault::unavailable, "no memory for a pool of " + std::to_string(bytes) + " bytes", code);
  }
  const auto start = reinterpret_cast<std::uintptr_t>(base_);
  address_ = reinterpret_cast<std::byte*>((start + huge_page - 1) / huge_page * huge_page);
  ::madvise(address_, rounded, MADV_HUGEPAGE);  // only advice: without it the pool has small pages

  std::atomic<int> failure{0};
  const std::uint64_t pieces = (rounded + huge_page - 1) / huge_page;
  parallel_ranges(pieces, usable_cores(), [&](std::size_t begin, std::size_t end, std::size_t) {
    const std::uint64_t from = begin * huge_page;
    const std::uint64_t to = end * huge_page < rounded ? end * huge_page : rounded;
    if (from < to)
      if (const int code = populate(address_ + from, to - from)) failure = code;
  });
  if (failure != 0) {
    const int code = failure;
    Mapping moved(std::move(*this));  // unmaps
    throw system_error(Fault::unavailable, "no memory behind a pool of " + std::to_string(bytes) + " bytes", code);
  }
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, mapped_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace kvxfer
