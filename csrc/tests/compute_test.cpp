#include "backend/compute.h"

#include <ctime>
#include <thread>

#include "backend/request.h"
#include "tests/check.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

constexpr Nanoseconds ms = 1'000'000;

Nanoseconds process_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * second + now.tv_nsec;
}

void finish(Compute& compute) {
  const Deadline deadline = soon();
  while (compute.done() < compute.units()) {
    if (deadline.passed()) throw Failure("compute does not end");
    std::this_thread::sleep_until(Deadline(compute.look_again()).time_point());
  }
}

// However late whoever waits for them wakes.
TEST(compute, timed_units_end_at_times_counted_from_the_start) {
  TimedCompute compute({2 * ms, 0, 3 * ms});
  for (int round = 0; round < 2; ++round) {
    const Nanoseconds began = now_ns();
    compute.start(began);
    CHECK_EQ(compute.look_again(), began + 2 * ms);
    finish(compute);
    CHECK_EQ(compute.done(), 3U);
    CHECK(now_ns() >= began + 5 * ms);
    for (const auto& [unit, after] : {std::pair{0U, 2 * ms}, {1U, 2 * ms}, {2U, 5 * ms}})
      CHECK_EQ(compute.ended(unit), began + after);
  }
}

TEST(compute, timed_units_have_not_ended_before_their_time) {
  TimedCompute compute({0, 3'000 * second});
  compute.start(now_ns());
  CHECK_EQ(compute.done(), 1U);
}

TEST(compute, timed_units_leave_the_cpu_to_others_and_spinning_ones_hold_it) {
  const std::vector<Nanoseconds> units(10, 10 * ms);
  TimedCompute timed(units);
  Nanoseconds before = process_cpu_ns();
  timed.start(now_ns());
  finish(timed);
  CHECK(process_cpu_ns() - before < 50 * ms);
  SpinCompute spinning(units);
  for (int round = 0; round < 2; ++round) {
    before = process_cpu_ns();
    const Nanoseconds began = now_ns();
    spinning.start(began);
    finish(spinning);
    CHECK(process_cpu_ns() - before >= 100 * ms);
    for (std::uint32_t unit = 0; unit < 10; ++unit) {
      CHECK(spinning.ended(unit) >= began + (unit + 1) * 10 * ms);
      CHECK(unit == 0 || spinning.ended(unit) > spinning.ended(unit - 1));
    }
  }
}

TEST(compute, spinning_ends_with_its_owner) {
  const Nanoseconds began = now_ns();
  {
    SpinCompute idle({second});
    SpinCompute spinning({3'000 * second});
    spinning.start(now_ns());
  }
  CHECK(now_ns() - began < 20 * second);
}

TEST(compute, another_threads_units_end_when_it_says_so) {
  ExternalCompute compute(3);
  const auto work = [&] {
    while (compute.await_start())
      for (int unit = 0; unit < 3; ++unit)
        if (!compute.unit_ended()) return;
  };
  const std::jthread worker(work);
  for (int round = 0; round < 100; ++round) {
    const Nanoseconds began = now_ns();
    compute.start(began);
    finish(compute);
    for (std::uint32_t unit = 0; unit < 3; ++unit) CHECK(compute.ended(unit) >= began);
    CHECK_THROWS(Fault::usage, "all units", compute.unit_ended());
  }
  compute.stop();
}

TEST(compute, times_that_make_no_sense_are_refused) {
  CHECK_THROWS(Fault::usage, "units of compute", TimedCompute({-1}));
  CHECK_THROWS(Fault::usage, "units of compute", TimedCompute({longest_compute, 1}));
  CHECK_THROWS(Fault::usage, "units of compute", SpinCompute({INT64_MAX, INT64_MAX}));
}

}  // namespace
}  // namespace kvxfer::test
