// One clock for all measurements: CLOCK_MONOTONIC in nanoseconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvxfer {

using Nanoseconds = std::int64_t;

inline Nanoseconds now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A point in time after which waiting has failed. Every wait takes one.
class Deadline {
 public:
  // The far future is as good as never: the sum must not overflow.
  static Deadline after(Nanoseconds ns) { return Deadline(now_ns() + std::min(ns, never)); }
  explicit Deadline(Nanoseconds at) : at_(at) {}

  bool passed() const { return now_ns() >= at_; }
  Nanoseconds at() const { return at_; }
  // For poll(2): milliseconds left, rounded up so that a wait never ends early; at most `cap`.
  int milliseconds_left(int cap = 60'000) const {
    const Nanoseconds left = at_ - now_ns();
    if (left <= 0) return 0;
    const Nanoseconds ms = (left + 999'999) / 1'000'000;
    return ms < cap ? static_cast<int>(ms) : cap;
  }
  std::chrono::steady_clock::time_point time_point() const {
    return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_));
  }

 private:
  static constexpr Nanoseconds never = Nanoseconds{1} << 61;

  Nanoseconds at_;
};

}  // namespace kvxfer
