// Memory for a pool: huge pages advised, every page there before it is handed out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// What a pool's memory is made of: private to this process, or a memfd that other processes can map.
enum class Backing : std::uint8_t { anonymous = 0, shared = 1 };

class Mapping {
 public:
  Mapping() = default;
  // `numa`: the node that the pages lie on; -1 leaves it to the kernel. Throws Error(unavailable) when the kernel
  // refuses the memory or there is no such node, Error(usage) for 0 bytes.
  explicit Mapping(std::uint64_t bytes, Backing backing = Backing::anonymous, int numa = -1);
  // The same memory once more, from another process's descriptor, which stays the caller's. Throws Error(unavailable)
  // when it cannot be mapped, or when there is no memory behind some page of it.
  static Mapping of_peer(int descriptor, std::uint64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }
  // Of shared memory: for other processes to map, sealed so that nobody can make it shorter. -1 where there is none.
  int descriptor() const { return descriptor_; }
  bool holds(const std::byte* at, std::uint64_t length) const {
    return at >= address_ && length <= bytes_ && static_cast<std::uint64_t>(at - address_) <= bytes_ - length;
  }

 private:
  void reserve(std::uint64_t bytes);
  void share(int descriptor);
  void touch(bool allocate);

  void* base_ = nullptr;  // what mmap returned; address_ is aligned to a huge page within it
  std::uint64_t mapped_ = 0;
  std::byte* address_ = nullptr;
  std::uint64_t bytes_ = 0;
  int descriptor_ = -1;
};

}  // namespace kvxfer
