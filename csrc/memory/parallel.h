// Work split over all cores, for what is done outside the timed part.
#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace kvxfer {

// The cores this process may run on.
std::size_t usable_cores();

// Calls body(begin, end, worker) on at most `workers` disjoint ranges that cover [0, count); body must not throw.
template <typename Body>
void parallel_ranges(std::size_t count, std::size_t workers, const Body& body) {
  if (workers > count) workers = count > 0 ? count : 1;
  const auto range = [&body, count, workers](std::size_t w) {
    // Not count * w / workers: that product can overflow.
    const std::size_t share = count / workers;
    const std::size_t rest = count % workers;
    const std::size_t begin = share * w + (w < rest ? w : rest);
    body(begin, begin + share + (w < rest ? 1 : 0), w);
  };
  std::vector<std::thread> threads;
  threads.reserve(workers);
  std::size_t started = 1;
  try {
    for (; started < workers; ++started) threads.emplace_back(range, started);
  } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
  }
  range(0);
  for (std::size_t w = started; w < workers; ++w) range(w);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvxfer
