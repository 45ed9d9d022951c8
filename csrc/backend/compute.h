// The prefill that transfers are hidden behind: it advances in units (a layer of a chunk of the prompt), one after
// another, and says which have ended and when.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/clock.h"

namespace kvxfer {

// All units of a request together.
inline constexpr Nanoseconds longest_compute = 3'600'000'000'000;

// start(), done() and look_again() are for one thread, that of the loop.
class Compute {
 public:
  explicit Compute(std::size_t units) : units_(static_cast<std::uint32_t>(units)), ended_(units) {}
  virtual ~Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  std::uint32_t units() const { return units_; }
  // Of a request: its first unit begins. The earlier request's units have all ended.
  virtual void start(Nanoseconds at) = 0;
  // How many units of the request have ended.
  virtual std::uint32_t done() = 0;
  // When a unit that has ended did.
  Nanoseconds ended(std::uint32_t unit) const { return ended_[unit]; }
  // Before this time another look is of little use.
  virtual Nanoseconds look_again() const = 0;

 protected:
  const std::uint32_t units_;
  std::vector<Nanoseconds> ended_;
};

// Unit i takes unit_ns[i], on no CPU, as when a GPU computes. Units end at times counted from the start, so that
// whoever waits for them may be late, but is not later each time.
class TimedCompute final : public Compute {
 public:
  explicit TimedCompute(const std::vector<Nanoseconds>& unit_ns);
  void start(Nanoseconds at) override;
  std::uint32_t done() override;
  Nanoseconds look_again() const override;

 private:
  const std::vector<Nanoseconds> after_;  // the start, to each unit's end
  std::uint32_t done_ = 0;
};

// Units that end on another thread.
class ThreadCompute : public Compute {
 public:
  using Compute::Compute;
  void start(Nanoseconds at) override;
  std::uint32_t done() override { return done_.load(std::memory_order_acquire); }
  Nanoseconds look_again() const override;

 protected:
  // For that thread: waits until a request starts whose units it has to compute. False: there will be none.
  bool await_start();
  void end_unit();
  void stop();
  std::uint32_t units_ended() const { return done_.load(std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint32_t> done_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable started_;
  bool waiting_ = false;  // under mutex_: a request has started, and nobody has taken it
};

// Unit i takes unit_ns[i] of CPU time: a core is held, and whoever else wants it makes the compute slower.
class SpinCompute final : public ThreadCompute {
 public:
  explicit SpinCompute(const std::vector<Nanoseconds>& unit_ns);
  ~SpinCompute() override;
  void start(Nanoseconds at) override;
  Nanoseconds look_again() const override;

 private:
  void spin();

  const std::vector<Nanoseconds> after_;  // the start, to each unit's end if nobody else wants the core
  Nanoseconds started_at_ = 0;
  std::thread thread_;
};

// Units that the owner computes on a thread of its own, by other means: it calls all but what the loop does.
class ExternalCompute final : public ThreadCompute {
 public:
  using ThreadCompute::await_start;
  using ThreadCompute::stop;
  using ThreadCompute::ThreadCompute;
  // False once stopped: nobody wants the rest. Throws Error(usage) when all have ended.
  bool unit_ended();
};

}  // namespace kvxfer
