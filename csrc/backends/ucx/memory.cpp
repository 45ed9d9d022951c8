#include "backends/ucx/memory.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace kvxfer::ucx {

namespace {

constexpr std::uint32_t magic = 0x5558564b;  // "KVXU"
constexpr std::uint32_t most_packed_bytes = 64 << 10;
constexpr std::size_t room_behind = 4096;

struct Head {
  std::uint32_t magic = ucx::magic;
  std::uint32_t pools = 0;
  std::uint64_t regions = 0;
};

struct PoolHead {
  std::uint32_t number = 0;
  std::uint32_t packed_bytes = 0;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

template <typename T>
void append(std::string& text, const T& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// What is left to read of a text; every step is held against its end.
struct Reader {
  std::span<const char> left;

  void bytes(void* into, std::size_t count) {
    if (count > left.size()) throw Error(Fault::usage, "the peer's keys are malformed");
    if (count > 0) std::memcpy(into, left.data(), count);
    left = left.subspan(count);
  }
  template <typename T>
  T value() {
    T read;
    bytes(&read, sizeof read);
    return read;
  }
};

}  // namespace

std::string write(const Keys& keys) {
  std::string text;
  append(text, Head{magic, static_cast<std::uint32_t>(keys.pools.size()), keys.regions.size()});
  for (const RegionKey& region : keys.regions) append(text, region);
  for (const PoolKey& pool : keys.pools) {
    append(text, PoolHead{pool.number, static_cast<std::uint32_t>(pool.packed.size()), pool.address, pool.bytes});
    text += pool.packed;
  }
  return text;
}

Keys read(const std::string& text) {
  const auto malformed = [] { return Error(Fault::usage, "the peer's keys are malformed"); };
  Reader reader{{text.data(), text.size()}};
  const Head head = reader.value<Head>();
  if (head.magic != magic || head.regions > text.size() / sizeof(RegionKey)) throw malformed();
  Keys keys;
  for (std::uint64_t i = 0; i < head.regions; ++i) keys.regions.push_back(reader.value<RegionKey>());
  for (std::uint32_t i = 0; i < head.pools; ++i) {
    const auto pool = reader.value<PoolHead>();
    if (pool.packed_bytes == 0 || pool.packed_bytes > most_packed_bytes || pool.bytes > UINT64_MAX - pool.address)
      throw malformed();
    PoolKey key{pool.number, pool.address, pool.bytes, std::string(pool.packed_bytes, '\0')};
    reader.bytes(key.packed.data(), pool.packed_bytes);
    key.packed.append(room_behind, '\0');
    keys.pools.push_back(std::move(key));
  }
  if (!reader.left.empty()) throw malformed();
  for (const RegionKey& region : keys.regions) {
    const auto pool = std::ranges::find(keys.pools, region.pool, &PoolKey::number);
    if (pool == keys.pools.end() || region.bytes > pool->bytes || region.place < pool->address ||
        region.place - pool->address > pool->bytes - region.bytes)
      throw Error(Fault::usage, "the peer's keys name memory beyond its pool");
  }
  return keys;
}

}  // namespace kvxfer::ucx
