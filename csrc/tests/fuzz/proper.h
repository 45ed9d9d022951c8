// What a hostile peer says properly, so that what follows gets past the first checks.
#pragma once

#include <string>
#include <vector>

#include "backend/lane_peer.h"
#include "tests/pair.h"

namespace kvxfer::test {

template <typename T>
std::string raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// A plan that is the same on both sides: two segments, which are the halves of region 0.
struct Halves {
  std::vector<std::uint32_t> zeros{0, 0}, starts{0, 1};
  std::vector<std::uint64_t> offsets, lengths;

  explicit Halves(std::uint64_t bytes) : offsets{0, bytes / 2}, lengths{bytes / 2, bytes / 2} {}

  PlanArrays arrays() const { return {zeros, offsets, zeros, offsets, lengths, starts}; }
  // What the peer says on lane 0 that prepares it.
  std::string notice() const {
    Notice one;
    one.kind = NoticeKind::prepare;
    one.count = lengths.size();
    one.payload_bytes = one.count * sizeof(WireDescriptor);
    std::string text = raw(one);
    for (std::size_t i = 0; i < lengths.size(); ++i) text += raw(WireDescriptor{0, 0, offsets[i], lengths[i]});
    return text;
  }
};

}  // namespace kvxfer::test
