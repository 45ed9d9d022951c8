#include "backend/event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace kvxfer {

EventQueue::EventQueue(std::size_t capacity) : ring_(capacity) {}

EventQueue::~EventQueue() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void EventQueue::reserve(std::size_t last_events) {
  const std::lock_guard lock(mutex_);
  std::rotate(ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(head_), ring_.end());
  head_ = 0;
  ring_.resize(ring_.size() + last_events);
  reserved_ += last_events;
}

void EventQueue::append(const Event& event) {
  ring_[(head_ + size_) % ring_.size()] = event;
  grown();
}

void EventQueue::grown() {
  if (++size_ == 1 && descriptor_ >= 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(descriptor_, &one, sizeof one);
  }
}

bool EventQueue::push(const Event& event) {
  {
    const std::lock_guard lock(mutex_);
    if (size_ + reserved_ >= ring_.size()) return false;
    append(event);
  }
  filled_.notify_one();
  return true;
}

void EventQueue::push_last(const Event& event) {
  {
    const std::lock_guard lock(mutex_);
    if (size_ < ring_.size()) append(event);
  }
  filled_.notify_one();
}

void EventQueue::stop_waiting() {
  {
    const std::lock_guard lock(mutex_);
    waiting_over_ = true;
  }
  filled_.notify_all();
}

std::size_t EventQueue::pop(std::span<Event> events, Deadline deadline) {
  std::unique_lock lock(mutex_);
  filled_.wait_until(lock, deadline.time_point(), [this] { return size_ > 0 || waiting_over_; });
  std::size_t taken = 0;
  while (taken < events.size() && size_ > 0) {
    events[taken++] = ring_[head_];
    head_ = (head_ + 1) % ring_.size();
    --size_;
  }
  if (descriptor_ >= 0 && taken > 0 && size_ == 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(descriptor_, &count, sizeof count);
  }
  return taken;
}

void EventQueue::put_back(std::span<const Event> events) {
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = events.size(); i-- > 0 && size_ < ring_.size();) {
      head_ = (head_ + ring_.size() - 1) % ring_.size();
      ring_[head_] = events[i];
      grown();
    }
  }
  filled_.notify_one();
}

int EventQueue::descriptor() {
  const std::lock_guard lock(mutex_);
  if (descriptor_ < 0) {
    descriptor_ = ::eventfd(size_ > 0 ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (descriptor_ < 0) throw system_error(Fault::unavailable, "no event descriptor (eventfd)", errno);
  }
  return descriptor_;
}

}  // namespace kvxfer
