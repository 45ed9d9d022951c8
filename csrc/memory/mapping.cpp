#include "memory/mapping.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#include "backend/error.h"
#include "memory/parallel.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14, not in older headers
#define MADV_POPULATE_READ 22
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

std::string what(std::uint64_t bytes) { return "a pool of " + std::to_string(bytes) + " bytes"; }

std::uint64_t in_pages(std::uint64_t bytes) { return (bytes + small_page - 1) / small_page * small_page; }

bool can_populate(std::byte* address) { return ::madvise(address, 0, MADV_POPULATE_WRITE) == 0; }

// Pages that are there already are mapped by reading: the kernel maps the ones around it at the same time, and shared
// memory to be written too. That takes a third of the time that one fault for every page does.
int populate(std::byte* address, std::uint64_t bytes, bool allocate) {
  return ::madvise(address, bytes, allocate ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0 ? 0 : errno;
}

// For kernels without MADV_POPULATE_WRITE: reads and writes one byte per page.
void touch_pages(std::byte* address, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += small_page) {
    auto* byte = reinterpret_cast<std::atomic<unsigned char>*>(address + at);
    byte->fetch_or(0, std::memory_order_relaxed);
  }
}

std::string nodes_here() {
  std::ifstream file("/sys/devices/system/node/online");
  std::string nodes;
  return file >> nodes ? nodes : "unknown";
}

// Before the pages are there: the policy decides where they come from.
void bind_to_node(std::byte* address, std::uint64_t bytes, int node) {
  constexpr std::size_t most_nodes = 1024;
  constexpr std::size_t bits = 8 * sizeof(unsigned long);
  std::array<unsigned long, most_nodes / bits> mask{};
  int code = EINVAL;
  if (node >= 0 && static_cast<std::size_t>(node) < most_nodes) {
    const auto bit = static_cast<std::size_t>(node);
    mask[bit / bits] |= 1UL << (bit % bits);
    if (::syscall(SYS_mbind, address, bytes, MPOL_BIND, mask.data(), most_nodes + 1, 0) == 0) return;
    code = errno;
  }
  throw system_error(Fault::unavailable,
                     "cannot bind memory to NUMA node " + std::to_string(node) + " (nodes here: " + nodes_here() + ")",
                     code);
}

int make_memfd(std::uint64_t bytes) {
  const int made = ::memfd_create("kvxfer-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0) throw system_error(Fault::unavailable, "no shared memory (memfd_create)", errno);
  const auto length = static_cast<off_t>(bytes);
  if (::ftruncate(made, length) == 0 && ::fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
    return made;
  const int code = errno;
  ::close(made);
  throw system_error(Fault::unavailable, "no shared memory for " + what(bytes), code);
}

}  // namespace

Mapping::Mapping(std::uint64_t bytes, Backing backing, int numa) : Mapping() {  // so that what follows may throw
  if (bytes == 0) throw Error(Fault::usage, "a pool of 0 bytes was asked for");
  if (numa < -1) throw Error(Fault::usage, "NUMA node " + std::to_string(numa) + ": give a node's number, or -1");
  reserve(bytes);
  if (backing == Backing::shared) {
    descriptor_ = make_memfd(in_pages(bytes));
    share(descriptor_);
  }
  ::madvise(address_, in_pages(bytes), MADV_HUGEPAGE);  // only advice: without it the pool has small pages
  if (numa >= 0) bind_to_node(address_, in_pages(bytes), numa);
  touch(true);
}

Mapping Mapping::of_peer(int descriptor, std::uint64_t bytes) {
  Mapping made;
  made.reserve(bytes);
  made.share(descriptor);
  ::madvise(made.address_, in_pages(bytes), MADV_HUGEPAGE);
  made.touch(false);
  return made;
}

// Addresses, and for anonymous memory all there is to it.
void Mapping::reserve(std::uint64_t bytes) {
  if (bytes > INT64_MAX - 2 * huge_page) throw Error(Fault::unavailable, "no memory: the pool exceeds 63 bits");
  mapped_ = in_pages(bytes) + huge_page;
  base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    const int code = errno;
    base_ = nullptr;
    throw system_error(Fault::unavailable, "no memory for " + what(bytes), code);
  }
  const auto start = reinterpret_cast<std::uintptr_t>(base_);
  address_ = reinterpret_cast<std::byte*>((start + huge_page - 1) / huge_page * huge_page);
  bytes_ = bytes;
}

void Mapping::share(int descriptor) {
  constexpr int access = PROT_READ | PROT_WRITE;
  if (::mmap(address_, in_pages(bytes_), access, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED)
    throw system_error(Fault::unavailable, "cannot map " + what(bytes_), errno);
}

// Every page, on all cores. What the kernel does not have is an error here, and no signal on first use.
void Mapping::touch(bool allocate) {
  const std::uint64_t rounded = in_pages(bytes_);
  const bool by_advice = can_populate(address_);
  if (!by_advice && allocate && descriptor_ >= 0)
    if (const int code = ::posix_fallocate(descriptor_, 0, static_cast<off_t>(rounded)))
      throw system_error(Fault::unavailable, "no memory behind " + what(bytes_), code);

  std::atomic<int> failure{0};
  const std::uint64_t pieces = (rounded + huge_page - 1) / huge_page;
  parallel_ranges(pieces, usable_cores(), [&](std::size_t begin, std::size_t end, std::size_t) {
    const std::uint64_t from = begin * huge_page;
    const std::uint64_t to = std::min(end * huge_page, rounded);
    if (from >= to) return;
    if (!by_advice)
      touch_pages(address_ + from, to - from);
    else if (const int code = populate(address_ + from, to - from, allocate))
      failure = code;
  });
  // EFAULT stands for the SIGBUS that touching the page would have been.
  const int code = failure == EFAULT ? ENOMEM : failure.load();
  if (code != 0) throw system_error(Fault::unavailable, "no memory behind " + what(bytes_), code);
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, mapped_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

}  // namespace kvxfer
