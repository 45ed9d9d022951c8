#include "memory/copy.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvxfer {

namespace {

#if defined(__x86_64__)

constexpr std::size_t line = 64;
constexpr std::size_t streams = 4;
constexpr std::size_t page = 4096;
// Below this a stream would be shorter than a page, and changing streams costs more than it gives.
constexpr std::size_t least_for_streams = streams * page;

// One line, `to` aligned, straight to memory.
inline void stream_line(char* to, const char* from) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}

// Streams further apart than this touch more pages at a time than the first address cache holds.
constexpr std::size_t most_at_once = 64 << 10;

// A large piece is read and written at four places in turn: the prefetchers stop at the end of a page, and while one
// stream starts anew the others go on.
void stream_some(char* to, const char* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(to) % line) % line);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  if (bytes >= least_for_streams) {
    const std::size_t part = bytes / streams / line * line;
    for (std::size_t at = 0; at < part; at += line)
      for (std::size_t s = 0; s < streams; ++s) stream_line(to + s * part + at, from + s * part + at);
    to += streams * part;
    from += streams * part;
    bytes -= streams * part;
  }
  for (; bytes >= line; bytes -= line, to += line, from += line) stream_line(to, from);
  std::memcpy(to, from, bytes);
}

void stream(char* to, const char* from, std::size_t bytes) {
  for (; bytes > most_at_once; bytes -= most_at_once, to += most_at_once, from += most_at_once)
    stream_some(to, from, most_at_once);
  stream_some(to, from, bytes);
}

// Whoever is told that the bytes are there has to find them.
void end_stream() { _mm_sfence(); }

#else

void stream(char* to, const char* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void end_stream() {}

#endif

}  // namespace

Nanoseconds copy_pieces(std::byte* to, std::span<const std::uint64_t> to_offsets, const std::byte* from,
                        std::span<const std::uint64_t> from_offsets, std::span<const std::uint64_t> lengths) {
  const Nanoseconds began = now_ns();
  for (std::size_t i = 0; i < lengths.size(); ++i) std::memcpy(to + to_offsets[i], from + from_offsets[i], lengths[i]);
  return now_ns() - began;
}

void copy_vectors(std::span<const iovec> to, std::span<const iovec> from, bool past_caches) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (past_caches)
      stream(static_cast<char*>(to[i].iov_base), static_cast<const char*>(from[i].iov_base), to[i].iov_len);
    else
      std::memcpy(to[i].iov_base, from[i].iov_base, to[i].iov_len);
  }
  if (past_caches) end_stream();
}

std::uint64_t cache_bytes() {
  // What this CPU shares in, as the kernel says it: sysconf() may add up the caches of CPUs that are not even here.
  for (const char* index : {"index3", "index2"}) {
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/") + index + "/size");
    std::uint64_t kib = 0;
    if (file >> kib && kib > 0) return kib << 10;  // "32768K"
  }
  return std::uint64_t{32} << 20;
}

}  // namespace kvxfer
