// Memory that UCX knows, on this side and on the other, and the keys by which the other side may reach it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/lane_peer.h"
#include "backends/ucx/library.h"

namespace kvxfer::ucx {

// Where `at` and the bytes from there on lie within one of these; they are few, and the last one is asked first.
template <typename Piece>
const Piece* holding(const std::vector<Piece>& pieces, std::size_t& last, std::uint64_t at, std::uint64_t bytes) {
  const auto holds = [&](const Piece& piece) {
    return at >= piece.address && bytes <= piece.bytes && at - piece.address <= piece.bytes - bytes;
  };
  if (last < pieces.size() && holds(pieces[last])) return &pieces[last];
  for (last = 0; last < pieces.size(); ++last)
    if (holds(pieces[last])) return &pieces[last];
  return nullptr;
}

// Of this side; ended with the context.
struct Pool {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  ucp_mem_h handle = nullptr;
  MemoryKind kind = MemoryKind::host;
};

// Of the other side, as its keys name it.
struct PoolKey {
  std::uint32_t number = 0;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::string packed;  // for ucp_ep_rkey_unpack, which knows no length: followed by room that it may read in vain
  bool operator==(const PoolKey&) const = default;
};

struct Keys {
  std::vector<RegionKey> regions;  // `place`: the address in its owner's process; `pool`: which key is for it
  std::vector<PoolKey> pools;
};

std::string write(const Keys& keys);
// Throws Error(usage) on what write() did not write, and on regions beyond their pools.
Keys read(const std::string& text);

}  // namespace kvxfer::ucx
