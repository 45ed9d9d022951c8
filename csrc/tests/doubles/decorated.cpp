#include "tests/doubles/decorated.h"

#include <algorithm>

namespace kvxfer::test {

namespace {
constexpr Nanoseconds slice = 1'000'000;  // between two steps
}

std::size_t Decorated::poll(std::span<Event> events, Deadline deadline) {
  for (;;) {
    step();
    // Without a wait when there is something to give, so that what is new comes after it.
    const bool wait = given_.empty();
    Event event;
    const Deadline until(wait ? std::min(deadline.at(), now_ns() + slice) : 0);
    for (bool more = inner_->poll({&event, 1}, until) > 0; more; more = inner_->poll({&event, 1}, Deadline(0)) > 0)
      take(event);
    const std::size_t count = std::min(events.size(), given_.size());
    std::copy_n(given_.begin(), count, events.begin());
    given_.erase(given_.begin(), given_.begin() + static_cast<std::ptrdiff_t>(count));
    if (count > 0 || closed_ || deadline.passed()) return count;
  }
}

void Decorated::progress(Deadline deadline) {
  step();
  inner_->progress(deadline);
}

}  // namespace kvxfer::test
