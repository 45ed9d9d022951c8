#include "backend/compute.h"

#include <algorithm>
#include <string>

#include "backend/error.h"
#include "backend/request.h"

namespace kvxfer {

namespace {

// Nobody says when a unit of another thread ends: it is looked for this often.
constexpr Nanoseconds look_interval = 50'000;

// Each one with those before it.
std::vector<Nanoseconds> sums(const std::vector<Nanoseconds>& unit_ns) {
  std::vector<Nanoseconds> after;
  Nanoseconds sum = 0;
  for (const Nanoseconds ns : unit_ns) {
    if (ns < 0 || ns > longest_compute - sum)
      throw Error(Fault::usage, "units of compute take from 0 to " + std::to_string(longest_compute) + " ns together");
    after.push_back(sum += ns);
  }
  return after;
}

}  // namespace

TimedCompute::TimedCompute(const std::vector<Nanoseconds>& unit_ns) : Compute(unit_ns.size()), after_(sums(unit_ns)) {}

void TimedCompute::start(Nanoseconds at) {
  done_ = 0;
  for (std::uint32_t unit = 0; unit < units_; ++unit) ended_[unit] = at + after_[unit];
}

std::uint32_t TimedCompute::done() {
  const Nanoseconds now = now_ns();
  while (done_ < units_ && ended_[done_] <= now) ++done_;
  return done_;
}

Nanoseconds TimedCompute::look_again() const { return ended_[done_]; }

void ThreadCompute::start(Nanoseconds) {
  done_.store(0, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    waiting_ = true;
  }
  started_.notify_one();
}

Nanoseconds ThreadCompute::look_again() const { return now_ns() + look_interval; }

bool ThreadCompute::await_start() {
  std::unique_lock lock(mutex_);
  started_.wait(lock, [this] { return waiting_ || stopped(); });
  waiting_ = false;
  return !stopped();
}

void ThreadCompute::end_unit() {
  const std::uint32_t unit = done_.load(std::memory_order_relaxed);
  ended_[unit] = now_ns();
  done_.store(unit + 1, std::memory_order_release);
}

void ThreadCompute::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_.store(true, std::memory_order_relaxed);
  }
  started_.notify_all();
}

bool ExternalCompute::unit_ended() {
  if (units_ended() == units_) throw Error(Fault::usage, "all units of this compute have ended");
  end_unit();
  return !stopped();
}

SpinCompute::SpinCompute(const std::vector<Nanoseconds>& unit_ns)
    : ThreadCompute(unit_ns.size()), after_(sums(unit_ns)) {
  thread_ = std::thread([this] { spin(); });
}

SpinCompute::~SpinCompute() {
  stop();
  thread_.join();
}

void SpinCompute::start(Nanoseconds at) {
  started_at_ = at;
  ThreadCompute::start(at);
}

Nanoseconds SpinCompute::look_again() const {
  return std::max(started_at_ + after_[std::min(units_ended(), units_ - 1)], ThreadCompute::look_again());
}

void SpinCompute::spin() {
  while (await_start()) {
    const Nanoseconds began = thread_cpu_ns();
    for (const Nanoseconds after : after_) {
      while (!stopped() && thread_cpu_ns() - began < after) {
      }
      if (stopped()) return;
      end_unit();
    }
  }
}

}  // namespace kvxfer
