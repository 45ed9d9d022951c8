// Anonymous memory for a pool: huge pages advised, every page touched before it is handed out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer {

class Mapping {
 public:
  Mapping() = default;
  // Throws Error(unavailable) when the kernel refuses the memory, Error(usage) for 0 bytes.
  explicit Mapping(std::uint64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;  // what mmap returned; address_ is aligned to a huge page within it
  std::uint64_t mapped_ = 0;
  std::byte* address_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace kvxfer
